// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/rank/pool_keeper.hpp"
#include "kvferry/ipc/wire/keeper_messages.hpp"
#include "wire/wire_version.hpp"

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

/// One that is stopped must not keep the others from being asked.
constexpr auto kEachDeadline = std::chrono::milliseconds(1000);

struct Answer {
  KeeperReply reply;
  std::vector<UniqueFd> fds;
  pid_t pid = 0;
};

/// Sent; the answer is to come.
Result<PacketSocket> ask_keeper(const std::filesystem::path& path,
                                const KeeperRequest& request,
                                Deadline deadline) {
  KVFERRY_ASSIGN(PacketSocket socket, PacketSocket::connect(path, deadline));
  KVFERRY_TRY(socket.send(encode(request)));
  return socket;
}

Result<Answer> answer_of(PacketSocket& socket,
                         const std::filesystem::path& path,
                         Deadline deadline) {
  // wait: a keeper's answer; deadline, at most kEachDeadline; the end of its process
  KVFERRY_ASSIGN(Packet packet, socket.receive(deadline));
  Answer answer;
  KVFERRY_ASSIGN(answer.reply,
                 decode_versioned<KeeperReply>(packet.bytes, "answer of a keeper", path.native()));
  answer.fds = std::move(packet.fds);
  answer.pid = socket.peer_pid();
  return answer;
}

Deadline soonest(Deadline deadline) { return deadline.earlier(Deadline::after(kEachDeadline)); }

KeptPool kept_pool(Answer answer, const std::filesystem::path& path) {
  KeptPool pool;
  pool.socket = path;
  pool.holder = path.filename().native();
  pool.pid = answer.pid;
  pool.in_use = answer.reply.in_use;
  pool.memory.id = answer.reply.pool;
  pool.memory.pool_bytes = answer.reply.pool_bytes;
  pool.memory.catalogue_bytes = answer.reply.catalogue_bytes;
  if (!answer.fds.empty()) pool.memory.pool = std::move(answer.fds.front());
  if (answer.fds.size() > 1) pool.memory.catalogue = std::move(answer.fds[1]);
  return pool;
}

}  // namespace

KeptPools find_kept_pools(const RuntimeDir& dir, bool succeeds, Deadline deadline) {
  KeptPools found;
  const auto names = dir.held_names();
  if (!names) {
    log_warn("kept pools are not found: {}", names.error().to_string());
    return found;
  }
  KeeperRequest request;
  request.succeeds = succeeds;
  const std::string ending = "." + std::string(PoolKeeper::kSocket);
  // All are asked before one is waited for: those that are stopped cost no more than one does.
  std::vector<std::pair<std::filesystem::path, PacketSocket>> asked;
  for (const HeldName& held : *names) {
    if (!held.name.ends_with(ending)) continue;
    const std::filesystem::path path = dir.path() / held.name;
    auto socket = ask_keeper(path, request, soonest(deadline));
    if (!socket) {
      found.silent.push_back({path.filename().native(), 0, socket.error()});
      continue;
    }
    asked.emplace_back(path, std::move(socket).value());
  }
  const Deadline answers = soonest(deadline);
  for (auto& [path, socket] : asked) {
    auto answer = answer_of(socket, path, answers);
    if (!answer) {
      found.silent.push_back({path.filename().native(), socket.peer_pid(), answer.error()});
    } else if (!answer->reply.pool.is_zero()) {
      found.pools.push_back(kept_pool(std::move(answer).value(), path));
    }
  }
  std::sort(found.pools.begin(), found.pools.end(),
            [](const KeptPool& a, const KeptPool& b) { return a.holder < b.holder; });
  return found;
}

Status drop_kept_pool(const KeptPool& pool, Deadline deadline) {
  KeeperRequest ask;
  ask.ask = KeeperAsk::kDrop;
  ask.pool = pool.memory.id;
  KVFERRY_ASSIGN(PacketSocket socket, ask_keeper(pool.socket, ask, deadline));
  KVFERRY_ASSIGN(const Answer answer, answer_of(socket, pool.socket, deadline));
  if (answer.reply.refused) return *answer.reply.refused;
  return ok();
}

}  // namespace kvferry::ipc
