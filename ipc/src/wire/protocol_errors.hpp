// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/log_gate.hpp"

#include <cstdint>

namespace kvferry::ipc {

/// What peers did against the protocol of a control server: counted, and logged through one gate.
class ProtocolErrors {
 public:
  void count(const Error& error) {
    ++count_;
    warn(error);
  }
  /// Logged only: nobody broke the protocol.
  void warn(const Error& error) {
    std::uint64_t suppressed = 0;
    if (gate_.open(suppressed)) {
      log_warn("control: {} ({} more like it)", error.to_string(), suppressed);
    }
  }
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }

 private:
  std::uint64_t count_ = 0;
  LogGate gate_;
};

}  // namespace kvferry::ipc
