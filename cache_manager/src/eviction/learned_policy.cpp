// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/ranked_blocks.hpp"
#include "eviction/reuse_model.hpp"
#include "kvferry/ipc/base/check.hpp"
#include "split_map.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <memory>

namespace kvferry::cache_manager {
namespace {

using Cell = ReuseModel::Cell;
using NodeId = std::uint32_t;
constexpr NodeId kNoNode = std::numeric_limits<NodeId>::max();
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

/// Blocks that are gone are watched for so many times what the cache holds; of a large cache only
/// a sample is, by key, and counted.
constexpr std::size_t kWatchedByCapacity = 8;
constexpr std::size_t kMostWatched = std::size_t{1} << 17U;
/// The model learns anew after so many blocks used: a part of the capacity.
constexpr double kLearnEvery = 0.05;
constexpr double kLearnEveryAtLeast = 400;

std::uint64_t mixed(std::uint64_t key) {  // the finalizer of splitmix64
  key = (key ^ (key >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  key = (key ^ (key >> 27U)) * 0x94D049BB133111EBULL;
  return key ^ (key >> 31U);
}

/// Numbers below Count, of which the first one is found without looking at all.
template <std::size_t Count> class FewNumbers {
 public:
  void insert(std::size_t number) { words_[number / kBits] |= bit_of(number); }
  void erase(std::size_t number) { words_[number / kBits] &= ~bit_of(number); }
  void clear() { words_ = {}; }
  /// The first one from there on; Count: none.
  [[nodiscard]] std::size_t next(std::size_t from) const {
    std::size_t word = from / kBits;
    if (word >= words_.size()) return Count;
    std::uint64_t left = words_[word] & (~std::uint64_t{0} << (from % kBits));
    while (left == 0) {
      if (++word == words_.size()) return Count;
      left = words_[word];
    }
    return word * kBits + static_cast<std::size_t>(std::countr_zero(left));
  }

 private:
  static constexpr std::size_t kBits = 64;
  static std::uint64_t bit_of(std::size_t number) { return std::uint64_t{1} << (number % kBits); }

  std::array<std::uint64_t, (Count + kBits - 1) / kBits> words_{};
};

/// What is worth least by ReuseModel goes. Blocks of one class and step of age lie in one cell, in
/// the order of their last use, so that a choice looks at cells, not at blocks.
class LearnedPolicy final : public EvictionPolicy {
 public:
  explicit LearnedPolicy(std::size_t capacity)
      : model_(capacity),
        most_watched_(capacity * kWatchedByCapacity),
        learn_every_(std::max(kLearnEveryAtLeast, kLearnEvery * static_cast<double>(capacity))) {
    while (most_watched_ > kMostWatched) {
      most_watched_ /= 2;
      sample_mask_ = sample_mask_ * 2 + 1;
    }
  }

 private:
  /// A block that is cached, or one that was and is watched.
  struct Node {
    std::uint64_t key = 0;
    std::uint64_t last = 0;  ///< When it was used.
    EntryId id = kNoEntry;
    Cell cell = 0;
    std::uint32_t uses = 0;
    std::uint32_t turn =
        0;  ///< How many times its prefix was continued after having been used again.
    bool counted = false;
    NodeId before = kNoNode;  ///< In its cell.
    NodeId after = kNoNode;
    NodeId gone_before = kNoNode;  ///< Among those that are gone.
    NodeId gone_after = kNoNode;
  };
  /// Of one cell.
  struct CellBlocks {
    NodeId first = kNoNode;
    NodeId last = kNoNode;
    RankedBlocks<std::uint64_t> free;
    std::uint64_t counted = 0;
    double counted_last = 0;  ///< Sum of Node::last of those.
  };
  /// There once a block was in one of them: of a small cache, or a tenant's, most are not.
  using ClassBlocks = std::array<CellBlocks, ReuseModel::kBins>;

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    grow_older();
    for (std::size_t i = 0; i < path.size(); ++i) {
      const NodeId node = fresh[i] ? enter(path[i]) : nodes_of_.at(path[i].id);
      Node& block = nodes_[node];
      bool after_long = false;
      if (block.uses > 0) {
        after_long = model_.is_long(now_ - block.last);
        count_time(block);
        if (block.counted) model_.add_use(block.cell);
        leave_cell(node);
      } else {
        block.turn = turn_of(path[i].id);
      }
      ++block.uses;
      block.last = now_;
      enter_cell(node, ReuseModel::first_cell(block.uses, block.turn, after_long));
    }
    model_.end_request();
    now_ += path.size();
    learn();
  }
  void on_free(EntryId id) override {
    const Node& node = nodes_[nodes_of_.at(id)];
    insert_free(node.cell, node.last, id);
  }
  void on_blocked(EntryId id) override {
    const Node& node = nodes_[nodes_of_.at(id)];
    erase_free(node.cell, node.last, id);
  }
  void on_gone(EntryId id, bool evicted) override {
    const NodeId node = nodes_of_.at(id);
    if (!evicted || !nodes_[node].counted) {
      forget(node);
      return;
    }
    nodes_[node].id = kNoEntry;
    watch(node);
    while (watched_.size() > most_watched_) {
      const NodeId oldest = first_gone_;
      unwatch(oldest);
      forget(oldest);
    }
  }
  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    for (std::size_t rank = with_free_.next(0); rank < ReuseModel::kCells;
         rank = with_free_.next(rank + 1)) {
      const Cell cell = model_.by_worth()[rank];
      if (const auto chosen = blocks_in(cell).free.first(may_evict)) return chosen;
    }
    return std::nullopt;
  }

  void insert_free(Cell cell, std::uint64_t last, EntryId id) {
    RankedBlocks<std::uint64_t>& free = blocks_in(cell).free;
    if (free.empty()) with_free_.insert(model_.rank(cell));
    free.insert(last, id);
  }
  void erase_free(Cell cell, std::uint64_t last, EntryId id) {
    RankedBlocks<std::uint64_t>& free = blocks_in(cell).free;
    free.erase(last, id);
    if (free.empty()) with_free_.erase(model_.rank(cell));
  }

  NodeId enter(const BlockUse& use) {
    NodeId node = kNoNode;
    if (const NodeId* watched = watched_.find(use.key)) {
      node = *watched;
      unwatch(node);
    } else if (!unused_.empty()) {
      node = unused_.back();
      unused_.pop_back();
    } else {
      node = static_cast<NodeId>(nodes_.size());
      nodes_.add();
    }
    nodes_[node].key = use.key;
    nodes_[node].id = use.id;
    nodes_[node].counted = (mixed(use.key) & sample_mask_) == 0;
    nodes_of_.make(use.id) = node;
    return node;
  }

  [[nodiscard]] std::uint32_t turn_of(EntryId id) const {
    const EntryId parent = parent_of(id);
    if (parent == kNoEntry) return 1;
    const Node& node = nodes_[nodes_of_.at(parent)];
    return node.uses > 1 ? node.turn + 1 : node.turn;
  }

  /// Blocks whose step of age is over are in the next one, which comes next.
  void grow_older() {
    for (std::size_t cell = with_blocks_.next(0); cell < ReuseModel::kCells;
         cell = with_blocks_.next(cell + 1)) {
      const auto here = static_cast<Cell>(cell);
      while (now_ >= due_[here]) {
        const NodeId node = blocks_in(here).first;
        const Node& block = nodes_[node];
        if (block.counted) {
          model_.add_time(here, static_cast<double>(model_.end(here) - model_.begin(here)));
        }
        const bool was_free = block.id != kNoEntry && is_free(block.id);
        if (was_free) erase_free(here, block.last, block.id);
        leave_cell(node);
        enter_cell(node, here + 1);
        if (was_free) insert_free(here + 1, block.last, block.id);
      }
    }
  }

  /// The time since it entered its cell.
  void count_time(const Node& block) {
    if (!block.counted) return;
    const std::uint64_t age = now_ - block.last;
    model_.add_time(block.cell, static_cast<double>(age - std::min(age, model_.begin(block.cell))));
  }

  void learn() {
    if (static_cast<double>(now_ - learned_) < learn_every_) return;
    std::vector<double> pending(ReuseModel::kCells, 0);
    for (Cell cell = 0; cell < ReuseModel::kCells; ++cell) {
      if (!has_blocks_of(cell)) continue;
      const CellBlocks& blocks = blocks_in(cell);
      const auto count = static_cast<double>(blocks.counted);
      const auto begin = static_cast<double>(model_.begin(cell));
      pending[cell] =
          std::max(0.0, count * (static_cast<double>(now_) - begin) - blocks.counted_last);
    }
    model_.learn(pending, static_cast<double>(now_ - learned_));
    learned_ = now_;
    with_free_.clear();  // in another order now
    for (std::size_t rank = 0; rank < ReuseModel::kCells; ++rank) {
      const Cell cell = model_.by_worth()[rank];
      if (has_blocks_of(cell) && !blocks_in(cell).free.empty()) with_free_.insert(rank);
    }
  }

  [[nodiscard]] bool has_blocks_of(Cell cell) const {
    return classes_[cell / ReuseModel::kBins] != nullptr;
  }
  CellBlocks& blocks_in(Cell cell) {
    std::unique_ptr<ClassBlocks>& blocks = classes_[cell / ReuseModel::kBins];
    if (blocks == nullptr) blocks = std::make_unique<ClassBlocks>();
    return (*blocks)[ReuseModel::bin_of(cell)];
  }

  void enter_cell(NodeId node, Cell cell) {
    Node& block = nodes_[node];
    CellBlocks& blocks = blocks_in(cell);
    block.cell = cell;
    block.before = blocks.last;
    block.after = kNoNode;
    (blocks.last == kNoNode ? blocks.first : nodes_[blocks.last].after) = node;
    blocks.last = node;
    if (block.before == kNoNode) tell_first(cell);
    if (block.counted) {
      ++blocks.counted;
      blocks.counted_last += static_cast<double>(block.last);
    }
  }
  void tell_first(Cell cell) {
    const NodeId first = blocks_in(cell).first;
    if (first == kNoNode) {
      with_blocks_.erase(cell);
      due_[cell] = kNever;
    } else {
      with_blocks_.insert(cell);
      due_[cell] = ReuseModel::is_last(cell) ? kNever : nodes_[first].last + model_.end(cell);
    }
  }
  void leave_cell(NodeId node) {
    const Node& block = nodes_[node];
    CellBlocks& blocks = blocks_in(block.cell);
    (block.before == kNoNode ? blocks.first : nodes_[block.before].after) = block.after;
    (block.after == kNoNode ? blocks.last : nodes_[block.after].before) = block.before;
    if (block.before == kNoNode) tell_first(block.cell);
    if (block.counted) {
      --blocks.counted;
      blocks.counted_last -= static_cast<double>(block.last);
    }
  }

  void watch(NodeId node) {
    Node& block = nodes_[node];
    if (const NodeId* same = watched_.find(block.key)) {
      const NodeId other = *same;
      unwatch(other);
      forget(other);
    }
    watched_[block.key] = node;
    block.gone_before = last_gone_;
    block.gone_after = kNoNode;
    (last_gone_ == kNoNode ? first_gone_ : nodes_[last_gone_].gone_after) = node;
    last_gone_ = node;
  }
  void unwatch(NodeId node) {
    const Node& block = nodes_[node];
    (block.gone_before == kNoNode ? first_gone_ : nodes_[block.gone_before].gone_after) =
        block.gone_after;
    (block.gone_after == kNoNode ? last_gone_ : nodes_[block.gone_after].gone_before) =
        block.gone_before;
    watched_.erase(block.key);
  }
  void forget(NodeId node) {
    count_time(nodes_[node]);
    leave_cell(node);
    nodes_[node] = Node();
    unused_.push_back(node);
  }

  ReuseModel model_;
  std::size_t most_watched_;
  std::uint64_t sample_mask_ = 0;
  double learn_every_;
  std::uint64_t now_ = 1;  ///< Blocks used.
  std::uint64_t learned_ = 1;
  PagedVector<Node> nodes_;
  std::vector<NodeId> unused_;
  PerBlock<NodeId> nodes_of_;
  std::array<std::unique_ptr<ClassBlocks>, ReuseModel::kClasses> classes_;
  FewNumbers<ReuseModel::kCells> with_blocks_;  ///< Cells.
  /// When the first block of each cell leaves it.
  std::vector<std::uint64_t> due_ = std::vector<std::uint64_t>(ReuseModel::kCells, kNever);
  FewNumbers<ReuseModel::kCells> with_free_;  ///< Cells, by their rank.
  SplitMap<std::uint64_t, NodeId> watched_;   ///< Gone, by key.
  NodeId first_gone_ = kNoNode;
  NodeId last_gone_ = kNoNode;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_learned_policy(std::size_t capacity) {
  return std::make_unique<LearnedPolicy>(capacity);
}

}  // namespace kvferry::cache_manager
