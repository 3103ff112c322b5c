// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/checksum.hpp"

// With wide vectors where the processor has them: from memory that is twice as fast (9 GB/s, 5
// without; Xeon with AVX-512), and the same sum.
#ifdef KVFERRY_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <array>
#include <numeric>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t known(std::uint64_t sum) noexcept { return sum == 0 ? 1 : sum; }

std::uint64_t joined(std::uint64_t sum, std::uint64_t next) noexcept {
  const std::array both{sum, next};
  return known(XXH3_64bits(both.data(), sizeof(both)));
}

}  // namespace

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  std::uint64_t sum = 0;
  for (bool is_first = true; is_first || !bytes.empty(); is_first = false) {
    const auto piece = bytes.first(std::min(bytes.size(), kChecksumPieceBytes));
    const std::uint64_t next = known(XXH3_64bits(piece.data(), piece.size()));
    sum = is_first ? next : joined(sum, next);
    bytes = bytes.subspan(piece.size());
  }
  return sum;
}

std::uint64_t combine_checksums(std::span<const std::uint64_t> pieces) noexcept {
  return std::accumulate(pieces.begin() + 1, pieces.end(), pieces.front(), joined);
}

}  // namespace kvferry::ipc
