// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::ipc::lease {

/// Tells whether memory that this process has released is really back at the device, or kept by
/// somebody else: a child that a dead attacher had forked.
///
/// Where the backend follows its memory (host), the answer is exact. Where it does not (CUDA), the
/// device's free memory is compared with what it was before the release; that figure is about all
/// processes, so this answer can be wrong: others who allocate meanwhile hide a return until they
/// free again, others who free as much feign one. Neither frees anything too early.
/// @threading the lease thread.
class ReturnCheck {
 public:
  ReturnCheck() = default;
  /// To be made before the release. free_bytes: of the device, arenas of ours that live on
  /// included.
  ReturnCheck(const Arena& arena, std::uint64_t free_bytes);

  /// free_bytes: as above, now. expected_bytes: by how much it is to have grown.
  [[nodiscard]] bool is_back(std::uint64_t free_bytes, std::uint64_t expected_bytes);
  /// Whether is_back() is a fact rather than an estimate.
  [[nodiscard]] bool is_exact() const noexcept { return exact_; }
  /// Something else of ours that was waited for is back: it must not count for this as well.
  void discount(std::uint64_t bytes) noexcept { baseline_bytes_ += bytes; }

 private:
  std::vector<std::unique_ptr<MemoryTrace>> kept_;
  bool exact_ = false;
  std::uint64_t baseline_bytes_ = 0;
};

/// True when `now` shows at least `bytes` more than `before`, less one part in 16 for other
/// processes that allocate meanwhile.
[[nodiscard]] constexpr bool memory_came_back(std::uint64_t before,
                                              std::uint64_t now,
                                              std::uint64_t bytes) noexcept {
  return now >= before + (bytes - bytes / 16);
}

}  // namespace kvferry::ipc::lease
