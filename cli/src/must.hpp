// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <utility>

namespace kvferry::cli {

/// For set-up, which throws: the value, or an Exception with the error.
template <typename T> T must(ipc::Result<T> result) {
  if (!result) throw ipc::Exception(result.error());
  return std::move(result).value();
}
inline void must(const ipc::Status& status) {
  if (!status) throw ipc::Exception(status.error());
}

}  // namespace kvferry::cli
