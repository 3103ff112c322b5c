// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_end.hpp"

#include <algorithm>
#include <span>

namespace kvferry::worker {

StoreEnd end_of_store(const Completion& offered, std::size_t first, std::size_t count) {
  if (offered.results.size() < first + count) return StoreEnd::kFailed;
  const auto results = std::span(offered.results).subspan(first, count);
  const auto all = [results](ipc::ErrorCode code) {
    return std::all_of(results.begin(), results.end(), [code](std::uint8_t result) {
      return result == static_cast<std::uint8_t>(code);
    });
  };
  if (std::all_of(results.begin(), results.end(), [](std::uint8_t r) { return r == 0; })) {
    return StoreEnd::kStored;
  }
  if (all(ipc::ErrorCode::kAlreadyExists)) return StoreEnd::kThere;
  if (all(ipc::ErrorCode::kNoHostMemory)) return StoreEnd::kNoRoom;
  return all(ipc::ErrorCode::kNotIdle) ? StoreEnd::kInUse : StoreEnd::kFailed;
}

}  // namespace kvferry::worker
