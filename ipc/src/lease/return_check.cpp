// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/return_check.hpp"

#include "kvferry/ipc/base/log.hpp"

namespace kvferry::ipc::lease {

ReturnCheck::ReturnCheck(const Arena& arena, std::uint64_t free_bytes)
    : kept_(arena.traces()), exact_(!kept_.empty()), baseline_bytes_(free_bytes) {}

bool ReturnCheck::is_back(std::uint64_t free_bytes, std::uint64_t expected_bytes) {
  if (!exact_) return memory_came_back(baseline_bytes_, free_bytes, expected_bytes);
  std::erase_if(kept_, [](const std::unique_ptr<MemoryTrace>& trace) {
    const auto kept = trace->is_kept();
    if (!kept) log_warn("lease: released memory: {}", kept.error().to_string());
    return kept && !*kept;
  });
  return kept_.empty();
}

}  // namespace kvferry::ipc::lease
