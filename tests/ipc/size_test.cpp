// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/size.hpp"

#include "kvferry/ipc/base/ids.hpp"

#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

TEST(SizeTest, ParsesBinaryAndDecimalUnits) {
  EXPECT_EQ(*parse_size("512"), 512U);
  EXPECT_EQ(*parse_size("64KiB"), 64U << 10);
  EXPECT_EQ(*parse_size("1.5 GiB"), 3ULL << 29);
  EXPECT_EQ(*parse_size("2GB"), 2'000'000'000U);
  EXPECT_EQ(*parse_size("8g"), 8ULL << 30);
}

TEST(SizeTest, RefusesWhatIsNoPositiveSize) {
  for (const char* text :
       {"", "x", "0", "-1", "-5GiB", "1e40", "nan", "inf", "5 apples", "1GiBx"}) {
    const auto size = parse_size(text);
    ASSERT_FALSE(size.has_value()) << text;
    EXPECT_EQ(size.error().code, ErrorCode::kInvalidArgument) << text;
  }
}

TEST(SizeTest, FormatsWithThreeDigits) {
  EXPECT_EQ(format_size(512), "512 B");
  EXPECT_EQ(format_size(3ULL << 29), "1.50 GiB");
  EXPECT_EQ(format_size(12ULL << 20), "12.0 MiB");
}

TEST(DigestTest, HexRoundTripsAndRefusesOtherText) {
  const Digest digest = Digest::random();
  EXPECT_EQ(*Digest::from_hex(digest.hex()), digest);
  EXPECT_FALSE(Digest::from_hex("12").has_value());
  EXPECT_FALSE(Digest::from_hex(std::string(32, 'g')).has_value());
  EXPECT_EQ(Digest::from_words(digest.high(), digest.low()), digest);
}

}  // namespace
}  // namespace kvferry::ipc
