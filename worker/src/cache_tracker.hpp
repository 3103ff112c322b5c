// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/worker/client.hpp"

#include <deque>
#include <vector>

namespace kvferry::worker {

/// What the manager says of the engine's cache, checked, and the events of its changes. An event
/// tells the state right after its change.
/// @threading one thread at a time.
class CacheTracker {
 public:
  /// options and stats outlive it.
  CacheTracker(const ClientOptions& options, ClientStats& stats)
      : options_(options), stats_(stats) {}

  /// Takes in an EngineState. One that cannot be is kProtocol and changes nothing.
  [[nodiscard]] Status take(const ipc::Bytes& body);
  /// The same with a manager's answer to our hello: it is connected. first: there was none before.
  [[nodiscard]] Status greet(const ipc::Bytes& body, bool first);
  void lose_manager();
  /// The same, told to nobody.
  void close() noexcept;

  [[nodiscard]] const CacheState& state() const noexcept { return state_; }
  /// Of this client's keys in the prefix table, and its groups' rules; none: no worker has
  /// registered.
  [[nodiscard]] const Digest& root() const noexcept { return root_; }
  [[nodiscard]] const std::vector<ipc::GroupRule>& rules() const noexcept { return rules_; }
  [[nodiscard]] bool has_events() const noexcept { return !events_.empty(); }
  [[nodiscard]] std::vector<CacheEvent> take_events();

 private:
  void note(CacheEventKind kind);
  /// Counts the contents of a state that is about to become ours; true when they are others.
  [[nodiscard]] bool count_contents(const ipc::EngineState& state,
                                    const std::vector<ArenaId>& ranks);

  const ClientOptions& options_;
  ClientStats& stats_;
  CacheState state_;
  /// What CacheState::contents counted last; no ranks: a clear has ended it.
  struct Contents {
    std::vector<ArenaId> ranks;
    std::vector<std::uint32_t> group_blocks;
    std::uint64_t generation = 0;
    bool is_of_this_manager = false;  ///< So that its generations tell of it, too.
  };
  Contents contents_;
  Digest root_;
  std::vector<ipc::GroupRule> rules_;
  std::deque<CacheEvent> events_;
};

}  // namespace kvferry::worker
