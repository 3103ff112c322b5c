// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/memory_user.hpp"

namespace kvferry::ipc {

std::string_view to_string(MemoryTag tag) noexcept {
  switch (tag) {
    case MemoryTag::kKvCache: return "kv_cache";
    case MemoryTag::kWeights: return "weights";
    case MemoryTag::kScratch: return "scratch";
  }
  return "invalid";
}

std::string to_string(MemoryTags tags) {
  std::string text;
  for (const MemoryTag tag : kMemoryTags) {
    if (!tags.has(tag)) continue;
    if (!text.empty()) text += ", ";
    text += to_string(tag);
  }
  return text.empty() ? "nothing" : text;
}

Status MemoryTags::check() const {
  const MemoryTags unknown = *this - all();
  if (unknown.empty()) return ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "memory tags {:#x}: this version knows {} ({:#x}) and no other", bits_,
                       to_string(all()), all().bits_);
}

}  // namespace kvferry::ipc
