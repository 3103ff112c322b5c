// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/codec.hpp"

#include "ipc/wire/message_filler.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "support/wire_messages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

namespace kvferry::ipc {
namespace {

using ::testing::HasSubstr;

template <typename T> T filled(std::uint64_t seed) {
  T message{};
  test::MessageFiller filler(seed);
  filler.fill(message);
  return message;
}

template <typename T> class MessageTest : public ::testing::Test {};

TYPED_TEST_SUITE(MessageTest, test::WireMessages<::testing::Types>);

TYPED_TEST(MessageTest, RoundTripsWithRandomAndEdgeValues) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const Bytes bytes = encode(filled<TypeParam>(seed));
    const auto decoded = decode<TypeParam>(bytes, "message");
    ASSERT_TRUE(decoded.has_value()) << decoded.error().to_string() << " seed " << seed;
    EXPECT_EQ(encode(*decoded), bytes) << "seed " << seed;
  }
}

TYPED_TEST(MessageTest, EveryTruncationAndEveryExtensionIsRefused) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    Bytes bytes = encode(filled<TypeParam>(seed));
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto cut = decode<TypeParam>(std::span(bytes).first(size), "message");
      ASSERT_FALSE(cut.has_value()) << size << " of " << bytes.size() << " bytes";
      EXPECT_EQ(cut.error().code, ErrorCode::kProtocol);
    }
    bytes.push_back(0);
    EXPECT_FALSE(decode<TypeParam>(bytes, "message").has_value());
  }
}

TYPED_TEST(MessageTest, MutationsNeverCrashAndWhatIsAcceptedIsWellFormed) {
  std::mt19937_64 random(7);
  constexpr int kMutations = 4000;
  for (int i = 0; i < kMutations; ++i) {
    Bytes bytes = encode(filled<TypeParam>(static_cast<std::uint64_t>(i) % 16));
    const std::uint64_t flips = 1 + random() % 3;
    for (std::uint64_t flip = 0; flip < flips; ++flip) {
      bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
    }
    const auto decoded = decode<TypeParam>(bytes, "message");
    if (!decoded) {
      EXPECT_EQ(decoded.error().code, ErrorCode::kProtocol);
      continue;
    }
    const Bytes again = encode(*decoded);
    EXPECT_TRUE(decode<TypeParam>(again, "message").has_value());
  }
}

TYPED_TEST(MessageTest, RandomBytesAreRefused) {
  std::mt19937_64 random(11);
  int accepted = 0;
  for (int i = 0; i < 2000; ++i) {
    Bytes bytes(random() % 64);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    if (decode<TypeParam>(bytes, "message")) ++accepted;
  }
  EXPECT_LT(accepted, 20);  // short ones such as a list of nothing happen to be well-formed
}

TEST(CodecTest, WritesTheDocumentedBytes) {
  RankClear clear;
  clear.session = Digest::from_words(0x0001020304050607, 0x08090a0b0c0d0e0f);
  clear.epoch = Epoch{300};
  clear.deadline = std::chrono::milliseconds(-1);
  const Bytes expected{0x93, 0xc4, 0x10, 0,  1,  2,  3,  4,    5, 6,  7,   8,
                       9,    10,   11,   12, 13, 14, 15, 0xcd, 1, 44, 0xff};
  EXPECT_EQ(encode(clear), expected);
}

TEST(CodecTest, HostileCountsAreRefusedBeforeAnythingIsAllocated) {
  const Bytes many_arrays[] = {
      {0x91, 0xdd, 0xff, 0xff, 0xff, 0xff},  // 2^32 - 1 digests
      {0x91, 0xdd, 0x00, 0x10, 0x00, 0x01},  // one more than may be
      {0x91, 0xdc, 0xff, 0xff, 0xc4, 0x10},  // 65535 with 2 bytes left
      {0xdd, 0xff, 0xff, 0xff, 0xff, 0x90},  // as the message itself
  };
  for (const Bytes& bytes : many_arrays) {
    const auto lookup = decode<Lookup>(bytes, "lookup");
    ASSERT_FALSE(lookup.has_value());
    EXPECT_THAT(lookup.error().message, HasSubstr("malformed lookup"));
  }
  for (const Bytes& bytes : {Bytes{0x91, 0xdb, 0xff, 0xff, 0xff, 0xff, 'a'},
                             Bytes{0x91, 0xda, 0xff, 0xff}, Bytes{0x91, 0xc6, 0, 0, 0, 1, 'a'}}) {
    EXPECT_FALSE(decode<StatusReply>(bytes, "status").has_value());
  }
}

TEST(CodecTest, AMillionElementsAreAllowedAndOneMoreIsNot) {
  AbandonStore message;
  message.slots.assign(kMaxWireElements, 1);
  EXPECT_TRUE(decode<AbandonStore>(encode(message), "abandon").has_value());
  message.slots.push_back(1);
  EXPECT_FALSE(decode<AbandonStore>(encode(message), "abandon").has_value());
}

TEST(CodecTest, MessagesBeyondTheSizeLimitAreRefused) {
  StatusReply status;
  status.json.assign(kMaxWireBytes - 6, 'x');
  EXPECT_TRUE(decode<StatusReply>(encode(status), "status").has_value());
  status.json.push_back('x');
  EXPECT_FALSE(decode<StatusReply>(encode(status), "status").has_value());
}

struct Deep {
  std::vector<Deep> inner;
  template <typename V> void visit(V& v) { v(inner); }
};

TEST(CodecTest, DeepNestingIsRefusedWithoutDeepRecursion) {
  Deep message;
  Deep* last = &message;
  for (int depth = 0; depth < kMaxWireDepth / 2 - 1; ++depth) {
    last = &last->inner.emplace_back();
  }
  EXPECT_TRUE(decode<Deep>(encode(message), "deep").has_value());
  last->inner.emplace_back();
  EXPECT_FALSE(decode<Deep>(encode(message), "deep").has_value());
  EXPECT_FALSE(decode<Deep>(Bytes(1'000'000, 0x91), "deep").has_value());
}

TEST(CodecTest, ValuesOutOfRangeAreRefused) {
  // MoverCancel takes a u64, PinReply a u32, ReservedSlot an enum and a u64, RankClear a duration.
  EXPECT_FALSE(decode<PinReply>(Bytes{0x91, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0}, "u32").has_value());
  EXPECT_FALSE(decode<PinReply>(Bytes{0x91, 0xff}, "negative").has_value());
  EXPECT_TRUE(decode<ReservedSlot>(Bytes{0x92, 4, 0}, "enum").has_value());
  EXPECT_FALSE(decode<ReservedSlot>(Bytes{0x92, 5, 0}, "enum above").has_value());
  EXPECT_FALSE(decode<ReservedSlot>(Bytes{0x92, 0, 0}, "enum below").has_value());
  EXPECT_FALSE(decode<Empty>(Bytes{0x91, 1}, "no bool").has_value());
  EXPECT_TRUE(decode<Empty>(Bytes{0x91, 0xc3}, "bool").has_value());
  EXPECT_FALSE(decode<Empty>(Bytes{0x92, 0xc3, 0xc3}, "one field more").has_value());
  EXPECT_FALSE(decode<Empty>(Bytes{0x90}, "one field less").has_value());
  EXPECT_FALSE(decode<Empty>(Bytes{0x81, 0xc3, 0xc3}, "a map").has_value());
  RankClear clear;
  clear.deadline = kMaxWireDuration;
  EXPECT_TRUE(decode<RankClear>(encode(clear), "clear").has_value());
  clear.deadline += std::chrono::milliseconds(1);
  EXPECT_FALSE(decode<RankClear>(encode(clear), "clear").has_value());
  clear.deadline = std::chrono::milliseconds::min();
  EXPECT_FALSE(decode<RankClear>(encode(clear), "clear").has_value());
  RankState state;
  EXPECT_TRUE(decode<RankState>(encode(state), "zero is a phase").has_value());
}

TEST(CodecTest, IntegersOfEveryWidthAndSignRoundTrip) {
  for (int shift = 0; shift < 64; ++shift) {
    for (const std::uint64_t delta : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{1}}) {
      DropSequence message;
      message.sequence = (std::uint64_t{1} << shift) + delta;
      EXPECT_EQ(decode<DropSequence>(encode(message), "u64")->sequence, message.sequence);
      StageReply reply;
      reply.error = Error{ErrorCode::kCuda, "x", static_cast<int>(message.sequence)};
      EXPECT_EQ(decode<StageReply>(encode(reply), "i32")->error->native_code,
                reply.error->native_code);
    }
  }
}

}  // namespace
}  // namespace kvferry::ipc
