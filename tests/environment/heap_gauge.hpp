// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace kvferry::test {

/// What libkvferry_heap.so, preloaded, tells of its process in a file of this struct's size, named
/// after the process's number in the folder KVFERRY_HEAP_FOLDER: what has been allocated and not
/// freed, to the byte, wherever the allocator keeps what was.
struct HeapGauge {
  std::atomic<std::int64_t> live_bytes;
};
inline constexpr const char* kHeapFolderVariable = "KVFERRY_HEAP_FOLDER";
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

}  // namespace kvferry::test
