// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/pool_keeper.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/wire/keeper_messages.hpp"
#include "wire/wire_version.hpp"

#include <array>
#include <chrono>
#include <span>
#include <utility>

namespace kvferry::ipc {
namespace {

/// Who asks does it at once.
constexpr auto kAskTime = std::chrono::seconds(2);
constexpr std::size_t kMostAskers = 16;

PacketListener listen_for_askers(const std::filesystem::path& path) {
  auto listener = PacketListener::listen(path);
  if (!listener) throw Exception(std::move(listener).error());
  return std::move(listener).value();
}

}  // namespace

PoolKeeper::PoolKeeper(EventLoop& loop,
                       const std::filesystem::path& path,
                       std::function<void()> on_dropped)
    : loop_(loop), on_dropped_(std::move(on_dropped)), listener_(listen_for_askers(path)) {
  loop_.watch(listener_->fd(), [this] { accept(); });
}

PoolKeeper::~PoolKeeper() {
  loop_.unwatch(listener_->fd());
  while (!askers_.empty()) forget(askers_.begin()->first);
}

void PoolKeeper::keep(PoolMemory memory) {
  memory_ = std::move(memory);
  is_offered_ = false;
}

void PoolKeeper::offer() {
  is_offered_ = true;
  answer_waiting();
}

void PoolKeeper::drop() {
  memory_ = {};
  is_offered_ = false;
  answer_waiting();
}

void PoolKeeper::answer_waiting() {
  std::vector<int> waiting;
  for (const auto& [fd, asker] : askers_) {
    if (asker.waits) waiting.push_back(fd);
  }
  for (const int fd : waiting) give(fd);
}

void PoolKeeper::accept() {
  for (;;) {
    auto socket = listener_->try_accept();
    if (!socket) {
      log_warn("nobody can ask for the kept pool now: {}", socket.error().to_string());
      return;
    }
    if (!socket->has_value()) return;
    // Who asks is of our user, and gets its answer within one turn: more than a few are a mistake.
    if (askers_.size() < kMostAskers) add(std::move(**socket));
  }
}

void PoolKeeper::add(PacketSocket socket) {
  const int fd = socket.fd();
  const TimerId timer = loop_.after(kAskTime, [this, fd] { on_late(fd); });
  askers_.emplace(fd, Asker{std::move(socket), timer});
  loop_.watch(fd, [this, fd] { on_packet(fd); });
}

void PoolKeeper::forget(int fd) {
  const auto at = askers_.find(fd);
  if (at == askers_.end()) return;
  loop_.unwatch(fd);
  loop_.cancel(at->second.timer);
  askers_.erase(at);
}

void PoolKeeper::on_late(int fd) {
  askers_.at(fd).timer = 0;
  if (askers_.at(fd).waits) give(fd);
  forget(fd);
}

void PoolKeeper::give(int fd) {
  KeeperReply reply;
  reply.pool = memory_.id;
  reply.pool_bytes = memory_.pool_bytes;
  reply.catalogue_bytes = memory_.catalogue_bytes;
  reply.in_use = memory_.valid() && !is_offered_;
  std::array<int, 2> fds{};
  std::size_t given = 0;
  if (is_offered()) {
    fds.at(given++) = memory_.pool.get();
    if (memory_.catalogue.valid()) fds.at(given++) = memory_.catalogue.get();
  }
  answer(fd, reply, std::span(fds).first(given));
}

void PoolKeeper::answer(int fd, const KeeperReply& reply, std::span<const int> fds) {
  if (const Status sent = askers_.at(fd).socket.send(encode(reply), fds); !sent) {
    log_debug("who asked for a kept pool did not wait: {}", sent.error().to_string());
  }
  forget(fd);
}

void PoolKeeper::on_packet(int fd) {
  PacketSocket& socket = askers_.at(fd).socket;
  auto packet = socket.try_receive();
  if (packet && !packet->has_value()) return;
  if (!packet) return forget(fd);
  KeeperReply reply;
  const auto request = decode_versioned<KeeperRequest>((*packet)->bytes, "request of a kept pool",
                                                       "who asks for a kept pool");
  if (!request) {
    log_warn("{}", request.error().to_string());
    reply.refused = request.error();
  } else if (request->ask == KeeperAsk::kGive) {
    if (request->succeeds && memory_.valid() && !is_offered_) {
      askers_.at(fd).waits = true;
      return;
    }
    return give(fd);
  } else if (!memory_.valid() || request->pool != memory_.id) {
    reply.refused = KVFERRY_ERROR(kNotFound, "pool {} is not kept here", request->pool.hex());
  } else if (!is_offered_) {
    reply.refused =
        KVFERRY_ERROR(kBusy, "the manager of pool {} lives: end that first", request->pool.hex());
  }
  answer(fd, reply, {});
  if (reply.refused) return;
  log_info("pool {} of {} is let go: nobody wants it", memory_.id.hex(),
           format_size(memory_.pool_bytes));
  drop();
  on_dropped_();
}

}  // namespace kvferry::ipc
