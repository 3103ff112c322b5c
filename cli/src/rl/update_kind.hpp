// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace kvferry::cli {

/// How an iteration of an RL loop gets new weights to the ranks.
enum class UpdateKind : std::uint8_t {
  kNone,         ///< The weights stay as they are.
  kDisk,         ///< Every rank reads its part of a file.
  kTensor,       ///< In messages, to every rank.
  kDistributed,  ///< Rank 0 reads a file for all.
  kIpc           ///< From device to device, out of the memory of processes that lend it.
};
/// What --update calls it.
[[nodiscard]] constexpr std::string_view to_string(UpdateKind kind) noexcept {
  switch (kind) {
    case UpdateKind::kNone: return "none";
    case UpdateKind::kDisk: return "disk";
    case UpdateKind::kTensor: return "tensor";
    case UpdateKind::kDistributed: return "distributed";
    case UpdateKind::kIpc: return "ipc";
  }
  return "none";
}

}  // namespace kvferry::cli
