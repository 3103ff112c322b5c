// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "split_map.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace kvferry::cache_manager {

/// A visible block among those that continue each other.
struct RunNode {
  ipc::BlockKey key;
  EntryId id = kNoEntry;     ///< What its owner knows it by.
  ipc::Digest before;        ///< The block that it continues; zero: none, or that is not known.
  RunNode* above = nullptr;  ///< That block, while it is visible and known as such.
  RunNode* below = nullptr;  ///< The first of those that continue it.
  /// Others that continue the same block, or wait for the same one.
  RunNode* next = nullptr;
  RunNode* previous = nullptr;
  bool waits = false;  ///< For `before` to be visible.
  /// How many in a row are there, this one included; 0: it is not visible.
  std::uint32_t run = 0;
  /// It goes next, with others: its run is nobody's concern any more.
  bool leaves = false;
};

[[nodiscard]] inline bool continues(const RunNode& node, const RunNode& before) {
  using Equal = SplitMapKey<ipc::BlockKey>::Equal;
  return node.key.group == before.key.group && Equal::is_same(node.before, before.key.block) &&
         Equal::is_same(node.key.root, before.key.root);
}

/// Keeps the runs of visible blocks, and tells them in the table that engines look at: so that
/// those see by a prefix's last block whether all of it is there. A block may come before the one
/// that it continues; they find each other when that one comes.
/// @threading one thread. @lifetime the table outlives it; nodes stay where they are while they are
/// in it.
class BlockRuns {
 public:
  /// Of a block that came later than one which continues it.
  using OnJoined = std::function<void(RunNode& below, RunNode& above)>;

  /// Some tenths of a second: a job's thousand blocks of long prefixes, in any order, take a tenth
  /// of them.
  static constexpr std::uint64_t kMostSteps = 1U << 22U;

  BlockRuns(ipc::PrefixTable& table, OnJoined on_joined, std::uint64_t most_steps = kMostSteps)
      : table_(table), on_joined_(std::move(on_joined)), most_steps_(most_steps) {}

  /// Before the calls of one request: how much of them is looked at for circles is bounded, and
  /// what is beyond it stays apart.
  void begin() noexcept { steps_left_ = most_steps_; }
  /// From now on what add() has to tell is told at once by tell(), in less time, before anybody
  /// else has his turn. @post tell(), before anything but add()
  void hold_back() noexcept { is_held_back_ = true; }
  void tell();
  /// It is visible from now on. @param above the visible block that it continues, or null
  void add(RunNode& node, RunNode* above);
  /// What it continues became known; both are visible. Nothing where that would be a circle, or it
  /// is known already.
  void link(RunNode& node, RunNode& above);
  /// It is not visible any more, nor in the table.
  void remove(RunNode& node);

 private:
  /// Where its run begins; null where that takes too long.
  [[nodiscard]] const RunNode* beginning_of(const RunNode& node);
  static void insert(RunNode*& first, RunNode& node);
  static void take_out(RunNode*& first, RunNode& node);
  static void hang(RunNode& below, RunNode& above);
  void wait(RunNode& node);
  void stop_waiting(RunNode& node);
  /// Of it and of all that continue it.
  void renew_runs(RunNode& node);
  void put(const RunNode& node);

  ipc::PrefixTable& table_;
  OnJoined on_joined_;
  /// The first of those that wait for a block.
  SplitMap<ipc::BlockKey, RunNode*> waiting_;
  const std::uint64_t most_steps_;
  std::uint64_t steps_left_ = most_steps_;
  std::vector<RunNode*> to_renew_;  ///< Of renew_runs(), kept for its memory.
  bool is_held_back_ = false;
  std::vector<ipc::PrefixTable::Put> held_back_;
};

}  // namespace kvferry::cache_manager
