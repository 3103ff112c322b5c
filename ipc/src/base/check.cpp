// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/check.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <cstdlib>

namespace kvferry::ipc::detail {

void check_failed(const char* expression,
                  std::string_view message,
                  const char* file,
                  int line) noexcept {
  try {
    log_error("check failed: {} ({}) at {}:{}", message, expression, file, line);
  } catch (...) {
    // About to abort, the text is all we lose.
  }
  std::abort();
}

}  // namespace kvferry::ipc::detail
