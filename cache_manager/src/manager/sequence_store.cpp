// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/sequence_store.hpp"

namespace kvferry::cache_manager {

SequenceStore::Life SequenceStore::open(const SequenceKey& key, const ipc::Digest& fingerprint) {
  Sequence& sequence = sequences_[key];
  if (sequence.life == 0) {
    sequence.life = next_life_++;
    sequence.fingerprint = fingerprint;
  }
  return sequence.life;
}

bool SequenceStore::put(const SequenceKey& key,
                        Life life,
                        ipc::GroupId group,
                        std::uint32_t index,
                        HostBlockRef block) {
  const auto at = sequences_.find(key);
  if (at == sequences_.end() || at->second.life != life) {
    return false;
  }
  HostBlockRef& place = at->second.blocks[{group.value, index}];
  if (place != nullptr) on_let_go_(*place);
  place = std::move(block);
  return true;
}

HostBlockRef SequenceStore::find(const SequenceKey& key,
                                 ipc::GroupId group,
                                 std::uint32_t index) const {
  const auto at = sequences_.find(key);
  if (at == sequences_.end()) {
    return nullptr;
  }
  const auto block = at->second.blocks.find({group.value, index});
  return block == at->second.blocks.end() ? nullptr : block->second;
}

void SequenceStore::drop_if_empty(const SequenceKey& key) {
  const auto at = sequences_.find(key);
  if (at != sequences_.end() && at->second.blocks.empty()) {
    sequences_.erase(at);
  }
}

void SequenceStore::tell(const Sequence& sequence) const {
  for (const auto& [place, block] : sequence.blocks) on_let_go_(*block);
}

bool SequenceStore::drop(const SequenceKey& key) {
  const auto at = sequences_.find(key);
  if (at == sequences_.end()) return false;
  tell(at->second);
  sequences_.erase(at);
  return true;
}

void SequenceStore::drop_block(const SequenceKey& key, const HostBlock& block) {
  const auto at = sequences_.find(key);
  if (at == sequences_.end()) return;
  std::erase_if(at->second.blocks, [&](const auto& item) {
    if (item.second.get() != &block) return false;
    on_let_go_(block);
    return true;
  });
}

void SequenceStore::drop_owner(const ipc::IncarnationId& owner) {
  std::erase_if(sequences_, [&](const auto& item) {
    if (item.first.owner != owner) return false;
    tell(item.second);
    return true;
  });
}

std::size_t SequenceStore::drop_other_geometries(std::uint32_t engine,
                                                 const ipc::Digest& fingerprint) {
  return std::erase_if(sequences_, [&](const auto& item) {
    if (item.first.engine != engine || item.second.fingerprint == fingerprint) return false;
    tell(item.second);
    return true;
  });
}

bool SequenceStore::has_engine(std::uint32_t engine) const {
  const auto at = sequences_.lower_bound({engine, ipc::IncarnationId{}, 0});
  return at != sequences_.end() && at->first.engine == engine;
}

std::map<const NamespaceAccount*, std::size_t> SequenceStore::blocks_by_account() const {
  std::map<const NamespaceAccount*, std::size_t> counts;
  for (const auto& [key, sequence] : sequences_) {
    for (const auto& [place, block] : sequence.blocks) ++counts[block->account()];
  }
  return counts;
}

std::size_t SequenceStore::blocks() const noexcept {
  std::size_t count = 0;
  for (const auto& [key, sequence] : sequences_) {
    count += sequence.blocks.size();
  }
  return count;
}

}  // namespace kvferry::cache_manager
