// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A scripted worker, mover or engine client that can be killed:
//   peer_child RUNTIME_DIR worker|mover|copier|engine RANK [RANKS]
// Workers and movers report epoch 1 as mapped. It says "ready", then what it gets: "job N" per
// mover job of N items. A copier is a mover that answers its jobs as done, a mover never answers; a
// worker answers what it is asked about staging. An engine reserves one block and says "reserved".
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "multiproc/manager/scripted_peer.hpp"
#include "support/child_side.hpp"

#include <exception>
#include <string>

namespace {

using kvferry::test::ScriptedPeer;
namespace ipc = kvferry::ipc;

int run_engine(const std::string& dir) {
  ScriptedPeer peer(dir, ipc::ProcessKind::kEngine, "engine child");
  ipc::EngineHello hello;
  hello.engine = "chat";
  hello.model = "tiny";
  hello.ranks = 2;
  hello.fingerprint = kvferry::test::tiny_geometry().fingerprint(ipc::ArenaOrder::kLayerFirst);
  const auto state = peer.call<ipc::EngineState>(ipc::MessageKind::kEngineHello, hello);
  if (!state) return 3;
  const auto reserved = peer.call<ipc::ReserveStoreReply>(
      ipc::MessageKind::kReserveStore,
      ipc::ReserveStore{{{ipc::GroupId{0}, ipc::Digest::from_words(77, 77)}}, {}});
  if (!reserved || reserved->slots.at(0).outcome != ipc::ReserveOutcome::kReserved) return 4;
  kvferry::test::say("reserved");
  (void)kvferry::test::hear();
  return 0;
}

int run_rank(const std::string& dir,
             const std::string& kind,
             std::uint32_t rank,
             std::uint32_t ranks) {
  ScriptedPeer peer(dir, kind == "worker" ? ipc::ProcessKind::kWorker : ipc::ProcessKind::kMover,
                    "rank child");
  if (!peer.rank_hello(rank, kvferry::test::tiny_geometry(ranks))) return 3;
  peer.report_mapped(rank, 1);
  kvferry::test::say("ready");
  while (kind == "worker") {
    const auto request = peer.next(ipc::MessageKind::kQuiesceStaging);
    if (!request) return 0;
    peer.reply(*request, ipc::Empty{});
  }
  while (const auto job = peer.next_body<ipc::MoverJob>(ipc::MessageKind::kMoverJob)) {
    kvferry::test::say("job " + std::to_string(job->items.size()));
    if (kind == "copier") peer.finish(*job);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) return 2;
  kvferry::test::disable_core_dumps();
  ipc::init_logging("peer", ipc::LogLevel::kWarn);
  const std::string dir = argv[1];
  const std::string kind = argv[2];
  try {
    if (kind == "engine") return run_engine(dir);
    return run_rank(dir, kind, static_cast<std::uint32_t>(std::stoul(argv[3])),
                    argc == 5 ? static_cast<std::uint32_t>(std::stoul(argv[4])) : 2);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 5;
  }
}
