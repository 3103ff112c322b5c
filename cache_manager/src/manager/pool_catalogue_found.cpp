// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What an earlier manager said of slots. Each record is copied, then looked at.
#include "manager/pool_catalogue.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>

namespace kvferry::cache_manager {

using catalogue::Block;
using catalogue::BlockState;
using catalogue::Root;
using catalogue::SumsState;

bool PoolCatalogue::read_record(const HostSlot& slot, RecordCopy& copy) const {
  const Block* record = block(slot);
  if (record == nullptr || record->check == 0) return false;
  const std::uint32_t sums = areas_[slot.slab].sums;
  copy_record(*record, sums, copy);
  return copy.record.check == check_of(copy, sums, *record) &&
         copy.record.state <= BlockState::kSequence;
}

bool PoolCatalogue::is_whole_at(const HostSlot& slot) const {
  RecordCopy copy;
  return read_record(slot, copy);
}

BlockState PoolCatalogue::state(std::uint32_t slab, std::uint32_t index) const {
  RecordCopy copy;
  return read_record({slab, index, 0}, copy) ? copy.record.state : BlockState::kNone;
}

std::optional<PoolCatalogue::FoundBlock> PoolCatalogue::find(const HostSlot& slot) const {
  RecordCopy copy;
  if (!read_record(slot, copy)) return std::nullopt;
  const Block& record = copy.record;
  if (record.state != BlockState::kVisible || !names_root(record) || record.block.is_zero()) {
    return std::nullopt;
  }
  FoundBlock found{.root = root_at(record.root),
                   .block = record.block,
                   .before = record.before,
                   .used = record.used};
  if (record.sums == SumsState::kKnown) {
    const Area& area = areas_[slot.slab];
    for (std::uint32_t at = 0; at < area.sums; at += area.sums_of_part) {
      // Those of a part that was not stored are zero.
      if (copy.sums[at] != 0) found.summed_parts |= std::uint64_t{1} << (at / area.sums_of_part);
    }
  } else if (record.sums == SumsState::kAwaited) {
    found.awaited = ipc::JobId{copy.sums[0]};
    found.parts = copy.sums[1];
  }
  return found;
}

std::optional<PoolCatalogue::FoundSequence> PoolCatalogue::find_sequence(
    const HostSlot& slot) const {
  if (state(slot.slab, slot.index) != BlockState::kSequence) return std::nullopt;
  const Block& record = *block(slot);
  const Root* named = root_of(record);
  if (named == nullptr || named->engine_bytes == 0) return std::nullopt;
  const std::size_t name_bytes = std::min<std::size_t>(named->engine_bytes, catalogue::kEngineName);
  return FoundSequence{std::string(named->engine.data(), name_bytes),
                       named->fingerprint,
                       record.block,
                       record.before.high(),
                       static_cast<std::uint32_t>(record.before.low()),
                       named->root};
}

PoolCatalogue::FoundSlot PoolCatalogue::adopt(std::uint32_t slab_id, std::uint32_t index) {
  const HostSlot slot{slab_id, index, 0};
  RecordCopy copy;
  if (!read_record(slot, copy)) {
    Block* const damaged = block(slot);
    if (damaged == nullptr || damaged->check == 0) return {};
    // It may have said that somebody writes there.
    ++damaged_;
    store_check(damaged->check, 0);
    *damaged = Block{};
    damaged->state = BlockState::kTaken;
    seal_block(slot, *damaged);
    return {BlockState::kTaken};
  }
  const Block& found = copy.record;
  if (found.state != BlockState::kVisible && found.state != BlockState::kSequence) {
    return {found.state};
  }
  if (!names_root(found) || known_roots_[found.root].fingerprint != areas_[slab_id].fingerprint) {
    Block& record = *block(slot);
    store_check(record.check, 0);
    record.state = BlockState::kNone;
    return {};
  }
  ++blocks_of_root_[found.root];
  if (lacks_sums(found)) ++unsummed_;
  return {found.state, found.root, found.used};
}

}  // namespace kvferry::cache_manager
