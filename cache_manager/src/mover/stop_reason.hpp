// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"

#include <optional>

namespace kvferry::cache_manager {

/// Why a running job has to stop; several may say so, in any order. The end of its epoch outlasts
/// every other reason: for it alone hand-overs to the worker are abandoned, and a lane that waited
/// for a worker that hangs would keep the arena.
/// @threading guarded by its owner.
class StopReason {
 public:
  void add(ipc::ErrorCode code) noexcept {
    if (code_ != ipc::ErrorCode::kRevoked) code_ = code;
  }
  void reset() noexcept { code_.reset(); }
  [[nodiscard]] std::optional<ipc::ErrorCode> get() const noexcept { return code_; }

 private:
  std::optional<ipc::ErrorCode> code_;
};

}  // namespace kvferry::cache_manager
