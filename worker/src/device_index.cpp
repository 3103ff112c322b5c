// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/device_index.hpp"

#include "kvferry/ipc/base/check.hpp"

namespace kvferry::worker {

using ipc::BlockId;
using ipc::Digest;

GroupIndex::GroupIndex(std::uint32_t block_count) : blocks_(block_count) {
  for (std::uint32_t i = block_count; i > 0; --i) push_free(i - 1);
}

GroupIndex::Block& GroupIndex::at(BlockId block) {
  KVFERRY_CHECK(block.value < blocks_.size(), "block id beyond the group");
  return blocks_[block.value];
}

const GroupIndex::Block& GroupIndex::at(BlockId block) const {
  KVFERRY_CHECK(block.value < blocks_.size(), "block id beyond the group");
  return blocks_[block.value];
}

std::optional<GroupIndex::Found> GroupIndex::find(const Digest& hash) const {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return std::nullopt;
  return Found{BlockId{found->second},
               blocks_[found->second].valid ? State::kValid : State::kPending};
}

std::optional<BlockId> GroupIndex::allocate() {
  std::uint32_t index = free_head_;
  if (index != kNone) {
    free_head_ = blocks_[index].next;
    --free_count_;
  } else {
    index = oldest_;
    if (index == kNone) return std::nullopt;
    unlink_kept(index);
    drop_entry(blocks_[index]);
  }
  blocks_[index].next = kNone;
  blocks_[index].references = 1;
  blocks_[index].used = false;
  return BlockId{index};
}

std::vector<BlockId> GroupIndex::next_victims(std::uint64_t count) const {
  std::vector<BlockId> victims;
  std::uint32_t index = oldest_;
  for (std::uint64_t i = free_count_; i < count && index != kNone; ++i) {
    victims.push_back(BlockId{index});
    index = blocks_[index].next;
  }
  return victims;
}

bool GroupIndex::announce(BlockId block, const Digest& hash, const Digest& before) {
  Block& entry = at(block);
  KVFERRY_CHECK(entry.references > 0 && !entry.indexed, "announce() of a block that is not ours");
  if (!by_hash_.emplace(hash, block.value).second) return false;
  entry.hash = hash;
  entry.before = before;
  entry.indexed = true;
  entry.valid = false;
  entry.stored = 0;
  return true;
}

void GroupIndex::make_valid(BlockId block, std::uint64_t when) {
  Block& entry = at(block);
  if (!entry.indexed) return;
  entry.valid = true;
  entry.valid_since = when;
}

void GroupIndex::drop_entry(Block& block) {
  by_hash_.erase(block.hash);
  block.indexed = false;
  block.valid = false;
  block.stored = 0;
}

void GroupIndex::forget(BlockId block) {
  Block& entry = at(block);
  if (!entry.indexed) return;
  drop_entry(entry);
  if (entry.references == 0) {
    unlink_kept(block.value);
    push_free(block.value);
  }
}

void GroupIndex::forget_all() {
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) forget(BlockId{i});
}

void GroupIndex::acquire(BlockId block) {
  Block& entry = at(block);
  if (entry.references == 0) {
    KVFERRY_CHECK(entry.indexed, "acquire() of a free block");
    unlink_kept(block.value);
    entry.used = false;
  }
  ++entry.references;
}

bool GroupIndex::drop_reference(BlockId block) {
  Block& entry = at(block);
  KVFERRY_CHECK(entry.references > 0, "release() of an unused block");
  if (--entry.references > 0) return false;
  if (entry.indexed && entry.valid) return true;
  if (entry.indexed) drop_entry(entry);
  push_free(block.value);
  return false;
}

void GroupIndex::release(BlockId block) {
  at(block).used = true;
  if (drop_reference(block)) append_kept(block.value);
}

void GroupIndex::release_as_oldest(BlockId block) {
  const bool used = at(block).used;
  if (!drop_reference(block)) return;
  if (used) {
    append_kept(block.value);
  } else {
    prepend_kept(block.value);
  }
}

GroupIndex::Contents GroupIndex::contents(BlockId block) const {
  const Block& entry = at(block);
  KVFERRY_CHECK(entry.indexed, "contents() of a block that is not indexed");
  return {entry.hash, entry.before};
}

void GroupIndex::mark_stored(BlockId block) {
  Block& entry = at(block);
  if (entry.indexed) entry.stored |= 1;
}

void GroupIndex::mark_stored(const Digest& unit, std::uint64_t parts) {
  if (const auto end = find(unit)) at(end->block).stored |= parts;
}

void GroupIndex::forget_stored(const Digest& unit) {
  if (const auto end = find(unit)) at(end->block).stored = 0;
}

std::uint64_t GroupIndex::stored_parts(const Digest& unit) const {
  const auto end = find(unit);
  return end ? at(end->block).stored : 0;
}

bool GroupIndex::is_stored(BlockId block) const { return at(block).stored != 0; }
std::uint64_t GroupIndex::valid_since(BlockId block) const { return at(block).valid_since; }
bool GroupIndex::is_indexed(BlockId block) const { return at(block).indexed; }
std::uint32_t GroupIndex::references(BlockId block) const { return at(block).references; }

void GroupIndex::unlink_kept(std::uint32_t index) {
  Block& entry = blocks_[index];
  (entry.previous == kNone ? oldest_ : blocks_[entry.previous].next) = entry.next;
  (entry.next == kNone ? newest_ : blocks_[entry.next].previous) = entry.previous;
  entry.previous = kNone;
  entry.next = kNone;
  --kept_count_;
}

void GroupIndex::append_kept(std::uint32_t index) {
  Block& entry = blocks_[index];
  entry.previous = newest_;
  entry.next = kNone;
  (newest_ == kNone ? oldest_ : blocks_[newest_].next) = index;
  newest_ = index;
  ++kept_count_;
}

void GroupIndex::prepend_kept(std::uint32_t index) {
  Block& entry = blocks_[index];
  entry.previous = kNone;
  entry.next = oldest_;
  (oldest_ == kNone ? newest_ : blocks_[oldest_].previous) = index;
  oldest_ = index;
  ++kept_count_;
}

void GroupIndex::push_free(std::uint32_t index) {
  blocks_[index].next = free_head_;
  free_head_ = index;
  ++free_count_;
}

}  // namespace kvferry::worker
