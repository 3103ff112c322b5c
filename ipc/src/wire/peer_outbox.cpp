// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/peer_outbox.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <utility>

namespace kvferry::ipc {

Status PeerOutbox::send(ZmqSocket& socket, Bytes bytes) {
  if (bytes.size() > kMaxWireBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "message of {} bytes to {}, {} are allowed",
                         bytes.size(), peer_.name, kMaxWireBytes);
  }
  if (!queue_->try_reserve(bytes.size())) {
    return KVFERRY_ERROR(kBusy, "the queue of {} messages or {} bytes to {} (process {}) is full",
                         queue_->max_messages(), queue_->max_bytes(), peer_.name, peer_.pid);
  }
  const int error = socket.send(peer_.id, std::move(bytes), queue_);
  switch (error) {
    case 0: return ok();
    case EHOSTUNREACH:
      return KVFERRY_ERROR(kNotFound, "{} (process {}) closed its connection", peer_.name,
                           peer_.pid);
    default:
      errno = error;
      return KVFERRY_ERRNO("sending to {} (process {})", peer_.name, peer_.pid);
  }
}

void PeerOutbox::remember(RequestId request, Bytes reply, bool refused) {
  replies_.finish(request, std::move(reply));
  if (!refused) return;
  if (unsent_.size() >= ReplyCache::kMaxReplies) unsent_.erase(unsent_.begin());
  unsent_.push_back(request);
}

// Whoever waits for a reply does not ask again. Forgotten ones are beyond help.
void PeerOutbox::send_unsent(ZmqSocket& socket) {
  std::size_t sent = 0;
  for (; sent < unsent_.size(); ++sent) {
    const Bytes* reply = replies_.find(unsent_[sent]);
    if (reply == nullptr) continue;
    const Status status = send(socket, Bytes(*reply));
    if (!status && status.error().code == ErrorCode::kBusy) break;
  }
  unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
}

}  // namespace kvferry::ipc
