// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/borrowed_remains.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <algorithm>

namespace kvferry::ipc::lease {

Remains look_at_remains(const Arena& released,
                        const std::function<bool(AllocationId)>& lent_elsewhere) {
  Remains remains;
  remains.of = released.borrowed().size();
  for (const auto& memory : released.borrowed()) {
    if (lent_elsewhere(memory->id())) {
      remains.shared_bytes += memory->size_bytes();
      continue;
    }
    const auto there = memory->still_allocated();
    if (!there) remains.note = there.error().message;
    if (there && !*there) continue;
    ++remains.allocations;
    remains.bytes += memory->size_bytes();
  }
  return remains;
}

std::string describe_remains(const Remains& remains, const std::string& failure) {
  const std::string cause =
      failure.empty() ? std::string(
                            "its release() was well, but tensors or its allocator's cache "
                            "keep them")
                      : fmt::format("its release() failed: {}", failure);
  return fmt::format(
      "this process's engine ({}; {} of {} allocations with {} still exist{}); free "
      "them there, or restart it",
      cause, remains.allocations, remains.of, format_size(remains.bytes),
      remains.note.empty() ? "" : "; " + remains.note);
}

bool lends(const Arena& arena, AllocationId id) {
  return arena.mapped() && std::any_of(arena.borrowed().begin(), arena.borrowed().end(),
                                       [id](const auto& memory) { return memory->id() == id; });
}

}  // namespace kvferry::ipc::lease
