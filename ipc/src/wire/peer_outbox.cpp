// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/peer_outbox.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstddef>
#include <utility>

namespace kvferry::ipc {

Status PeerOutbox::send(ZmqSocket& socket, PacketSocket& registry, Bytes bytes) {
  if (bytes.size() > kMaxWireBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "message of {} bytes to {}, {} are allowed",
                         bytes.size(), peer_.name, kMaxWireBytes);
  }
  std::optional<SequenceFrame> frame;
  if (channel_) {
    if (!registry.valid()) {
      return KVFERRY_ERROR(kNotFound, "{} (process {}) closed its connection", peer_.name,
                           peer_.pid);
    }
    if (channel_->try_send(bytes)) {
      if (channel_->take_bell()) ring_bell(registry);
      return ok();
    }
    frame = channel_->next_frame();
  }
  if (!queue_->try_reserve(bytes.size())) {
    return KVFERRY_ERROR(kBusy, "the queue of {} messages or {} bytes to {} (process {}) is full",
                         queue_->max_messages(), queue_->max_bytes(), peer_.name, peer_.pid);
  }
  const int error = socket.send(peer_.id, frame, std::move(bytes), queue_);
  switch (error) {
    case 0:
      if (channel_) channel_->sent_over_socket();
      return ok();
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
void PeerOutbox::send_unsent(ZmqSocket& socket, PacketSocket& registry) {
  std::size_t sent = 0;
  for (; sent < unsent_.size(); ++sent) {
    const Bytes* reply = replies_.find(unsent_[sent]);
    if (reply == nullptr) continue;
    const Status status = send(socket, registry, Bytes(*reply));
    if (!status && status.error().code == ErrorCode::kBusy) break;
  }
  unsent_.erase(unsent_.begin(), unsent_.begin() + static_cast<std::ptrdiff_t>(sent));
}

}  // namespace kvferry::ipc
