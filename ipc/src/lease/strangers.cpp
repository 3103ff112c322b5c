// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/strangers.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::ipc::lease {
namespace {

constexpr std::size_t kMaxStrangers = 32;
constexpr std::ptrdiff_t kMaxOfProcess = 8;
// Connections taken in one go, so that a flood of them does not hold up grants and clears.
constexpr int kAcceptsPerRound = 16;
constexpr auto kAcceptPause = std::chrono::milliseconds(200);

}  // namespace

Strangers::Strangers(EventLoop& loop,
                     PacketListener& listener,
                     std::string tag,
                     std::chrono::milliseconds hello_time,
                     Hooks hooks)
    : loop_(loop),
      listener_(listener),
      tag_(std::move(tag)),
      hello_time_(hello_time),
      hooks_(std::move(hooks)) {
  loop_.watch(listener_.fd(), [this] { accept(); });
}

Strangers::~Strangers() {
  while (!waiting_.empty()) take(waiting_.begin()->first);
  loop_.cancel(pause_timer_);
  loop_.unwatch(listener_.fd());
}

void Strangers::accept() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    auto accepted = listener_.try_accept();
    if (!accepted) {
      log_warn("{}: accept: {}", tag_, accepted.error().to_string());
      pause_accepting();
      return;
    }
    if (!accepted->has_value()) return;
    PacketSocket socket = std::move(**accepted);
    if (Status room = check_room(socket); !room) {
      hooks_.on_surplus(socket, std::move(room).error());
      continue;
    }
    const int fd = socket.fd();
    const TimerId timer = loop_.after(hello_time_, [this, fd] {
      log_warn("{}: a connection said no hello within {} ms; closed", tag_, hello_time_.count());
      take(fd);
    });
    waiting_.emplace(fd, Stranger{std::move(socket), timer});
    loop_.watch(fd, [this, fd] { on_event(fd); });
  }
}

// One process alone cannot keep the others out.
Status Strangers::check_room(const PacketSocket& socket) const {
  const pid_t pid = socket.peer_pid();
  const auto of_process = std::count_if(waiting_.begin(), waiting_.end(), [pid](const auto& entry) {
    return entry.second.socket.peer_pid() == pid;
  });
  if (waiting_.size() < kMaxStrangers && of_process < kMaxOfProcess) return ok();
  return KVFERRY_ERROR(kBusy, "{}: {} connections have not said hello yet, {} of them of pid {}",
                       tag_, waiting_.size(), of_process, pid);
}

// No descriptors left, say: the listener stays readable, so it is left alone for a while.
void Strangers::pause_accepting() {
  loop_.unwatch(listener_.fd());
  pause_timer_ = loop_.after(kAcceptPause, [this] {
    pause_timer_ = 0;
    loop_.watch(listener_.fd(), [this] { accept(); });
  });
}

void Strangers::on_event(int fd) {
  const auto found = waiting_.find(fd);
  KVFERRY_CHECK(found != waiting_.end(), "an event of a connection that is gone");
  auto packet = found->second.socket.try_receive();
  if (packet && !packet->has_value()) return;
  PacketSocket socket = take(fd);
  if (!packet) {
    log_debug("{}: a connection ended before its hello: {}", tag_, packet.error().to_string());
    return;
  }
  hooks_.on_packet(std::move(socket), std::move(**packet));
}

PacketSocket Strangers::take(int fd) {
  auto node = waiting_.extract(fd);
  loop_.cancel(node.mapped().timer);
  loop_.unwatch(fd);
  return std::move(node.mapped().socket);
}

}  // namespace kvferry::ipc::lease
