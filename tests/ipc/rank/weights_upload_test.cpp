// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/weights_upload.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <numeric>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

class WeightsUploadTest : public testing::Test {
 protected:
  WeightsUploadTest() : image_(1000) { std::iota(image_.begin(), image_.end(), std::uint8_t{3}); }
  [[nodiscard]] WeightsPart part(std::uint64_t from, std::uint64_t size) const {
    WeightsPart part;
    part.upload = id_;
    part.offset = from;
    part.total_bytes = image_.size();
    part.bytes.assign(image_.begin() + static_cast<std::ptrdiff_t>(from),
                      image_.begin() + static_cast<std::ptrdiff_t>(from + size));
    return part;
  }
  void expect_complete() const {
    const auto path = upload_.complete(id_.hex());
    ASSERT_TRUE(path.has_value()) << path.error().to_string();
    std::ifstream file(*path, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    EXPECT_TRUE(
        std::equal(bytes.begin(), bytes.end(), image_.begin(), image_.end(),
                   [](char a, std::uint8_t b) { return static_cast<std::uint8_t>(a) == b; }));
  }

  Bytes image_;
  const Digest id_ = Digest::random();
  WeightsUpload upload_;
};

TEST_F(WeightsUploadTest, PartsInOrderMakeTheImage) {
  EXPECT_FALSE(upload_.complete(id_.hex()).has_value());
  for (std::uint64_t from = 0; from < 1000; from += 250) {
    EXPECT_FALSE(upload_.complete(id_.hex()).has_value());
    ASSERT_TRUE(upload_.take(part(from, 250)).has_value());
  }
  expect_complete();
}

TEST_F(WeightsUploadTest, APartThatComesTwiceIsNoError) {
  ASSERT_TRUE(upload_.take(part(0, 600)).has_value());
  ASSERT_TRUE(upload_.take(part(0, 600)).has_value());
  ASSERT_TRUE(upload_.take(part(300, 300)).has_value());
  ASSERT_TRUE(upload_.take(part(600, 400)).has_value());
  ASSERT_TRUE(upload_.take(part(600, 400)).has_value());
  expect_complete();
}

TEST_F(WeightsUploadTest, AGapIsRefusedAndWhatIsThereStays) {
  ASSERT_TRUE(upload_.take(part(0, 100)).has_value());
  const auto gap = upload_.take(part(200, 100));
  ASSERT_FALSE(gap.has_value());
  EXPECT_EQ(gap.error().code, ErrorCode::kProtocol);
  EXPECT_THAT(gap.error().message, HasSubstr("has 100 of 1000 bytes"));
  ASSERT_TRUE(upload_.take(part(100, 900)).has_value());
  expect_complete();
}

TEST_F(WeightsUploadTest, WhatDoesNotBelongToItIsRefused) {
  ASSERT_TRUE(upload_.take(part(0, 500)).has_value());
  WeightsPart other = part(500, 500);
  other.upload = Digest::random();
  EXPECT_FALSE(upload_.take(other).has_value());
  WeightsPart longer = part(500, 500);
  longer.total_bytes = 2000;
  EXPECT_FALSE(upload_.take(longer).has_value());
  WeightsPart beyond = part(500, 500);
  beyond.bytes.resize(501);
  EXPECT_FALSE(upload_.take(beyond).has_value());
  beyond.offset = UINT64_MAX - 3;
  EXPECT_FALSE(upload_.take(beyond).has_value());
  ASSERT_TRUE(upload_.take(part(500, 500)).has_value());
  expect_complete();
}

TEST_F(WeightsUploadTest, ANewOneTakesItsPlace) {
  ASSERT_TRUE(upload_.take(part(0, 1000)).has_value());
  WeightsPart other = part(0, 10);
  other.upload = Digest::random();
  other.total_bytes = 10;
  ASSERT_TRUE(upload_.take(other).has_value());
  EXPECT_FALSE(upload_.complete(id_.hex()).has_value());
  EXPECT_TRUE(upload_.complete(other.upload.hex()).has_value());
}

TEST_F(WeightsUploadTest, ItIsForgottenWhenItsSenderSaysSo) {
  ASSERT_TRUE(upload_.take(part(0, 1000)).has_value());
  WeightsPart end;
  end.upload = Digest::random();
  ASSERT_TRUE(upload_.take(end).has_value());
  expect_complete();
  end.upload = id_;
  ASSERT_TRUE(upload_.take(end).has_value());
  const auto gone = upload_.complete(id_.hex());
  ASSERT_FALSE(gone.has_value());
  EXPECT_EQ(gone.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(gone.error().message, HasSubstr("send all of its parts"));
}

}  // namespace
}  // namespace kvferry::ipc
