// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/checksum.hpp"

#include <xxhash.h>

namespace kvferry::ipc {

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  const std::uint64_t sum = XXH3_64bits(bytes.data(), bytes.size());
  return sum == 0 ? 1 : sum;
}

}  // namespace kvferry::ipc
