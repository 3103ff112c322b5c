// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keyed_hash.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

/// 0, 1, 2, ...
std::vector<std::uint8_t> counted(std::size_t size) {
  std::vector<std::uint8_t> bytes(size);
  std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
  return bytes;
}

Digest test_key() {
  Digest key;
  std::iota(key.bytes.begin(), key.bytes.end(), std::uint8_t{0});
  return key;
}

// vectors_sip128 of the authors' reference implementation; OpenSSL computes the same.
TEST(KeyedHashTest, IsSipHashOf128Bits) {
  for (const auto& [size, expected] :
       std::vector<std::pair<std::size_t, std::string>>{{0, "a3817f04ba25a8e66df67214c7550293"},
                                                        {1, "da87c1d86b99af44347659119b22fc45"},
                                                        {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                                                        {8, "3b62a9ba6258f5610f83e264f31497b4"},
                                                        {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
                                                        {28, "0664da1668574b88b935f3027358aef4"},
                                                        {63, "5150d1772f50834a503e069a973fbd7c"}}) {
    const std::vector<std::uint8_t> bytes = counted(size);
    EXPECT_EQ(keyed_hash(test_key(), bytes.data(), bytes.size()).hex(), expected) << size;
  }
}

TEST(KeyedHashTest, AnotherKeyIsAnotherHash) {
  const std::vector<std::uint8_t> bytes = counted(28);
  for (std::size_t i = 0; i < 16; ++i) {
    Digest other = test_key();
    other.bytes[i] ^= 1U;
    EXPECT_NE(keyed_hash(other, bytes.data(), bytes.size()),
              keyed_hash(test_key(), bytes.data(), bytes.size()));
  }
}

}  // namespace
}  // namespace kvferry::ipc
