// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/reply_cache.hpp"

#include <utility>

namespace kvferry::ipc {

ReplyCache::Lookup ReplyCache::begin(RequestId request) {
  if (const auto found = requests_.find(request); found != requests_.end()) {
    if (!found->second) return {Seen::kRunning, nullptr};
    return {Seen::kReplied, &*found->second};
  }
  if (request <= latest_) return {Seen::kForgotten, nullptr};
  if (requests_.size() - replied_.size() >= kMaxRunning) return {Seen::kTooMany, nullptr};
  requests_.emplace(request, std::nullopt);
  latest_ = request;
  return {Seen::kNew, nullptr};
}

const Bytes* ReplyCache::find(RequestId request) const {
  const auto found = requests_.find(request);
  return found == requests_.end() || !found->second ? nullptr : &*found->second;
}

void ReplyCache::finish(RequestId request, Bytes reply) {
  std::optional<Bytes>& entry = requests_[request];
  if (entry) {
    reply_bytes_ -= entry->size();
  } else {
    replied_.push_back(request);
  }
  reply_bytes_ += reply.size();
  entry = std::move(reply);
  while (replied_.size() > kMaxReplies || (replied_.size() > 1 && reply_bytes_ > kMaxReplyBytes)) {
    drop_oldest();
  }
}

void ReplyCache::drop_oldest() {
  const auto oldest = requests_.find(replied_.front());
  reply_bytes_ -= oldest->second->size();
  requests_.erase(oldest);
  replied_.pop_front();
}

}  // namespace kvferry::ipc
