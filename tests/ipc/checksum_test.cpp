// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/checksum.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace kvferry::ipc {
namespace {

std::vector<std::byte> contents(std::size_t size) {
  std::mt19937_64 random(size);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::uint64_t> pieces_of(std::span<const std::byte> bytes) {
  std::vector<std::uint64_t> sums;
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kChecksumPieceBytes));
    sums.push_back(checksum(piece));
    bytes = bytes.subspan(piece.size());
  }
  return sums;
}

TEST(ChecksumTest, IsThatOfItsPiecesJoined) {
  for (const std::size_t size : {std::size_t{1}, kChecksumPieceBytes - 1, kChecksumPieceBytes,
                                 kChecksumPieceBytes + 1, 3 * kChecksumPieceBytes + 17}) {
    const auto bytes = contents(size);
    EXPECT_EQ(checksum(bytes), combine_checksums(pieces_of(bytes))) << size;
  }
}

TEST(ChecksumTest, AnyByteAndTheOrderOfPiecesCount) {
  auto bytes = contents(3 * kChecksumPieceBytes);
  std::set<std::uint64_t> sums{checksum(bytes)};
  for (std::size_t at = 0; at < bytes.size(); at += kChecksumPieceBytes / 4 - 1) {
    bytes[at] ^= std::byte{1};
    EXPECT_TRUE(sums.insert(checksum(bytes)).second) << at;
    bytes[at] ^= std::byte{1};
  }
  const auto piece = static_cast<std::ptrdiff_t>(kChecksumPieceBytes);
  std::rotate(bytes.begin(), bytes.begin() + piece, bytes.end());
  EXPECT_TRUE(sums.insert(checksum(bytes)).second);
}

TEST(ChecksumTest, NothingHasOneThatIsKnown) {
  EXPECT_NE(checksum({}), 0U);
  EXPECT_EQ(checksum({}), checksum(contents(0)));
}

}  // namespace
}  // namespace kvferry::ipc
