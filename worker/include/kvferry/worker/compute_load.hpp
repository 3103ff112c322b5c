// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace kvferry::worker {

/// Work that a worker's device does again and again beside the swaps, so that what they cost it can
/// be measured.
enum class ComputeLoadKind : std::uint8_t {
  /// A recorded graph of many short kernels that stream weights: what a token of a decoding model
  /// is made of. One launch is a token.
  kDecode = 1,
  kGemm,    ///< A product of 8192 x 8192 bfloat16 matrices, which fills all multiprocessors.
  kSkinny,  ///< A product of 64 rows with weights: a projection of a decoding batch.
  kHbm      ///< A single kernel that does nothing but read device memory.
};
inline constexpr std::array kComputeLoads = {ComputeLoadKind::kDecode, ComputeLoadKind::kGemm,
                                             ComputeLoadKind::kSkinny, ComputeLoadKind::kHbm};
[[nodiscard]] std::string_view to_string(ComputeLoadKind kind) noexcept;
[[nodiscard]] ipc::Result<ComputeLoadKind> parse_compute_load(std::string_view text);

struct ComputeLoadConfig {
  ComputeLoadKind kind = ComputeLoadKind::kDecode;
  /// Gets the ends of its rounds, one after another: 64-bit nanoseconds of CLOCK_MONOTONIC.
  std::string times_file;
};

/// A load that runs until this is destroyed.
class RunningLoad {
 public:
  virtual ~RunningLoad() = default;
};
/// For workers other than the reference worker. failed: called once, on the load's thread, when a
/// round fails or its file cannot be written. Throws Exception when the device has not what the
/// load needs. @lifetime the device outlives it.
[[nodiscard]] std::unique_ptr<RunningLoad> start_compute_load(
    ipc::Device& device,
    const ComputeLoadConfig& config,
    std::function<void(const ipc::Error&)> failed);

}  // namespace kvferry::worker
