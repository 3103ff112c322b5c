// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/block_runs.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

ipc::BlockKey key_of_above(const RunNode& node) {
  return {node.key.root, node.before, node.key.group};
}

}  // namespace

void BlockRuns::insert(RunNode*& first, RunNode& node) {
  node.previous = nullptr;
  node.next = first;
  if (first != nullptr) first->previous = &node;
  first = &node;
}

void BlockRuns::take_out(RunNode*& first, RunNode& node) {
  if (node.previous != nullptr) {
    node.previous->next = node.next;
  } else {
    first = node.next;
  }
  if (node.next != nullptr) node.next->previous = node.previous;
  node.next = node.previous = nullptr;
}

void BlockRuns::hang(RunNode& below, RunNode& above) {
  below.above = &above;
  insert(above.below, below);
}

void BlockRuns::wait(RunNode& node) {
  node.waits = true;
  insert(waiting_[key_of_above(node)], node);
}

void BlockRuns::stop_waiting(RunNode& node) {
  if (!node.waits) return;
  node.waits = false;
  const ipc::BlockKey above = key_of_above(node);
  RunNode** first = waiting_.find(above);
  KVFERRY_CHECK(first != nullptr, "a block waits for one that nobody waits for");
  take_out(*first, node);
  if (*first == nullptr) waiting_.erase(above);
}

const RunNode* BlockRuns::beginning_of(const RunNode& node) {
  const RunNode* at = &node;
  while (at->above != nullptr) {
    if (steps_left_ == 0) return nullptr;
    --steps_left_;
    at = at->above;
  }
  return at;
}

void BlockRuns::put(const RunNode& node) {
  if (is_held_back_) {
    held_back_.push_back({node.key, {false, node.run}});
  } else {
    table_.put(node.key, {false, node.run});
  }
}

void BlockRuns::tell() {
  table_.put(held_back_);
  held_back_.clear();
  is_held_back_ = false;
}

void BlockRuns::renew_runs(RunNode& node) {
  to_renew_.assign(1, &node);
  while (!to_renew_.empty()) {
    RunNode& next = *to_renew_.back();
    to_renew_.pop_back();
    if (next.leaves) continue;
    const std::uint32_t above = next.above == nullptr ? 0 : next.above->run;
    const std::uint32_t run = std::min(above + 1, ipc::PrefixTable::kMostRun);
    if (next.run == run) continue;
    next.run = run;
    put(next);
    for (RunNode* below = next.below; below != nullptr; below = below->next) {
      to_renew_.push_back(below);
    }
  }
}

void BlockRuns::add(RunNode& node, RunNode* above) {
  KVFERRY_CHECK(node.run == 0 && node.above == nullptr && node.below == nullptr && !node.waits,
                "a block becomes visible twice");
  if (above != nullptr) {
    hang(node, *above);
  } else if (!node.before.is_zero()) {
    wait(node);
  }
  renew_runs(node);
  if (waiting_.empty()) return;
  RunNode* const* found = waiting_.find(node.key);
  if (found == nullptr) return;
  RunNode* below = *found;
  waiting_.erase(node.key);
  // One of them may be where this one's own run begins: engines that are mistaken make circles.
  const RunNode* beginning = beginning_of(node);
  while (below != nullptr) {
    RunNode& next = *std::exchange(below, below->next);
    next.waits = false;
    next.next = next.previous = nullptr;
    if (beginning == nullptr || beginning == &next) continue;
    hang(next, node);
    renew_runs(next);
    on_joined_(next, node);
  }
}

void BlockRuns::link(RunNode& node, RunNode& above) {
  KVFERRY_CHECK(!is_held_back_, "runs are changed while some are still to be told");
  if (node.above != nullptr) return;
  const RunNode* beginning = beginning_of(above);
  if (beginning == nullptr || beginning == &node) return;
  stop_waiting(node);
  node.before = above.key.block;
  hang(node, above);
  renew_runs(node);
  on_joined_(node, above);
}

void BlockRuns::remove(RunNode& node) {
  KVFERRY_CHECK(!is_held_back_, "runs are changed while some are still to be told");
  stop_waiting(node);
  if (node.above != nullptr) take_out(node.above->below, node);
  node.above = nullptr;
  node.run = 0;
  node.leaves = true;
  table_.erase(node.key);
  while (node.below != nullptr) {
    RunNode& below = *node.below;
    take_out(node.below, below);
    below.above = nullptr;
    below.before = node.key.block;
    wait(below);
    renew_runs(below);
  }
}

}  // namespace kvferry::cache_manager
