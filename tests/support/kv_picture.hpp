// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/kv_event_subscriber.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>

namespace kvferry::test {

/// What somebody knows of a host tier who applies what a subscriber gives, as a router does.
class KvPicture {
 public:
  using Blocks = std::set<std::pair<std::uint32_t, ipc::Digest>>;  ///< Group and hash.
  using News = ipc::KvEventSubscriber::News;

  void apply(const News& news) {
    if (news.kind == News::Kind::kReset) topics_.clear();
    complete_ =
        news.kind == News::Kind::kComplete || (complete_ && news.kind != News::Kind::kReset);
    ++news_[news.kind];
    for (const ipc::KvEvent& event : news.batch.events) {
      apply(topics_[news.topic], event);
    }
  }
  [[nodiscard]] const Blocks& of(const std::string& topic) { return topics_[topic]; }
  [[nodiscard]] const std::map<std::string, Blocks>& topics() const { return topics_; }
  /// There was a snapshot, and all of it is here.
  [[nodiscard]] bool is_complete() const { return complete_; }
  [[nodiscard]] std::size_t count(News::Kind kind) { return news_[kind]; }
  [[nodiscard]] std::size_t clears() const { return clears_; }

 private:
  void apply(Blocks& blocks, const ipc::KvEvent& event) {
    if (const auto* stored = std::get_if<ipc::KvStored>(&event)) {
      for (const ipc::Digest& hash : stored->hashes) blocks.emplace(stored->group.value, hash);
    } else if (const auto* removed = std::get_if<ipc::KvRemoved>(&event)) {
      for (const ipc::Digest& hash : removed->hashes) blocks.erase({removed->group.value, hash});
    } else {
      blocks.clear();
      ++clears_;
    }
  }

  std::map<std::string, Blocks> topics_;
  std::map<News::Kind, std::size_t> news_;
  std::size_t clears_ = 0;
  bool complete_ = false;
};

}  // namespace kvferry::test
