// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/sequence_store.hpp"

namespace kvferry::cache_manager {

SequenceStore::Life SequenceStore::open(std::uint32_t engine,
                                        std::uint64_t handle,
                                        const ipc::IncarnationId& owner) {
  Sequence& sequence = sequences_[{engine, handle}];
  if (sequence.life == 0) {
    sequence.life = next_life_++;
    sequence.owner = owner;
  }
  return sequence.life;
}

bool SequenceStore::put(std::uint32_t engine,
                        std::uint64_t handle,
                        Life life,
                        ipc::GroupId group,
                        std::uint32_t index,
                        HostBlockRef block) {
  const auto at = sequences_.find({engine, handle});
  if (at == sequences_.end() || at->second.life != life) {
    return false;
  }
  at->second.blocks[{group.value, index}] = std::move(block);
  return true;
}

HostBlockRef SequenceStore::find(std::uint32_t engine,
                                 std::uint64_t handle,
                                 ipc::GroupId group,
                                 std::uint32_t index) const {
  const auto at = sequences_.find({engine, handle});
  if (at == sequences_.end()) {
    return nullptr;
  }
  const auto block = at->second.blocks.find({group.value, index});
  return block == at->second.blocks.end() ? nullptr : block->second;
}

void SequenceStore::drop_if_empty(std::uint32_t engine, std::uint64_t handle) {
  const auto at = sequences_.find({engine, handle});
  if (at != sequences_.end() && at->second.blocks.empty()) {
    sequences_.erase(at);
  }
}

bool SequenceStore::drop(std::uint32_t engine, std::uint64_t handle) {
  return sequences_.erase({engine, handle}) > 0;
}

void SequenceStore::drop_owner(const ipc::IncarnationId& owner) {
  std::erase_if(sequences_, [&](const auto& item) { return item.second.owner == owner; });
}

std::size_t SequenceStore::blocks() const noexcept {
  std::size_t count = 0;
  for (const auto& [key, sequence] : sequences_) {
    count += sequence.blocks.size();
  }
  return count;
}

}  // namespace kvferry::cache_manager
