// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "support/child_process.hpp"
#include "worker/scripted_manager.hpp"

#include <gtest/gtest.h>

#include <set>

namespace kvferry {
namespace {

using ipc::Envelope;
using ipc::IncarnationId;
using ipc::MessageKind;
using test::ManagerThread;
using test::ScriptedManager;

template <typename T> T body(const Envelope& envelope) {
  return ipc::decode<T>(envelope.body, "test").value();
}

/// A host tier of one engine: what was stored is found again.
void serve_host_tier(ScriptedManager& manager, std::set<ipc::Digest>& stored) {
  manager.state.generation = 1;
  manager.state.phase = ipc::CachePhase::kReady;
  manager.state.offload_ready = true;
  manager.state.ranks = {{ipc::SessionId::from_words(1, 1), ipc::Epoch{1}, {}, {}}};
  manager.state.group_blocks = {64};
  manager.scripts[MessageKind::kLookup] = [&stored](ScriptedManager& m, const IncarnationId& from,
                                                    const Envelope& request) {
    ipc::LookupReply reply;
    for (const ipc::Digest& hash : body<ipc::Lookup>(request).blocks) {
      const bool hit = stored.contains(hash);
      reply.presence.push_back(hit ? 3 : 1);
      if (hit && reply.usable_prefix + 1 == reply.presence.size()) ++reply.usable_prefix;
    }
    (void)m.server().reply(from, request, reply);
  };
  manager.scripts[MessageKind::kReserveStore] =
      [&stored](ScriptedManager& m, const IncarnationId& from, const Envelope& request) {
        ipc::ReserveStoreReply reply;
        for (const ipc::StoreKey& key : body<ipc::ReserveStore>(request).keys) {
          stored.insert(key.block);
          reply.slots.push_back({ipc::ReserveOutcome::kReserved, stored.size()});
        }
        (void)m.server().reply(from, request, reply);
      };
  manager.scripts[MessageKind::kSubmitStore] = [](ScriptedManager& m, const IncarnationId& from,
                                                  const Envelope& request) {
    const auto job = body<ipc::SubmitStore>(request);
    (void)m.server().reply(from, request, ipc::Empty{});
    m.send_done(job.job, std::vector<std::uint8_t>(job.items.size(), 0));
  };
  manager.scripts[MessageKind::kSubmitLoad] = [](ScriptedManager& m, const IncarnationId& from,
                                                 const Envelope& request) {
    const auto job = body<ipc::SubmitLoad>(request);
    (void)m.server().reply(from, request, ipc::Empty{});
    m.send_done(job.job, std::vector<std::uint8_t>(job.items.size(), 0));
  };
}

TEST(ExampleEngineTest, StoresTheFirstTimeAndLoadsTheSecond) {
  const test::ShortTempDir temp;
  const auto dir = ipc::RuntimeDir::open(temp.path().string(), "default").value();
  std::set<ipc::Digest> stored;
  ManagerThread manager(dir, [&](ScriptedManager& m) { serve_host_tier(m, stored); });
  test::ChildProcess engine({.program = test::sibling_program("example_engine"),
                             .environment = {"KVFERRY_RUNTIME_DIR=" + temp.path().string()}});
  const std::vector<std::string> expected{"ready: generation 1, 64 device blocks",
                                          "loaded 0 of 4 blocks", "stored 4 blocks",
                                          "loaded 4 of 4 blocks"};
  for (const std::string& line : expected) {
    EXPECT_EQ(engine.read_line(test::soon()), line) << engine.stderr_text();
  }
  EXPECT_EQ(engine.wait(test::soon()), test::ChildExit::exited(0)) << engine.stderr_text();
}

TEST(ExampleEngineTest, SaysWhatIsMissingWithoutAManager) {
  const test::ShortTempDir temp;
  test::ChildProcess engine({.program = test::sibling_program("example_engine"),
                             .environment = {"KVFERRY_RUNTIME_DIR=" + temp.path().string()}});
  EXPECT_EQ(engine.wait(test::soon()), test::ChildExit::exited(1));
  EXPECT_NE(engine.stderr_text().find("no_manager"), std::string::npos) << engine.stderr_text();
}

}  // namespace
}  // namespace kvferry
