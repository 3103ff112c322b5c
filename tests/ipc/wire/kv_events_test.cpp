// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/kv_events.hpp"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <string_view>

namespace kvferry::ipc {
namespace {

/// Bytes as somebody writes them who has only the description of the format.
class Expected {
 public:
  Expected& byte(std::initializer_list<int> values) {
    for (const int value : values) bytes_.push_back(static_cast<std::uint8_t>(value));
    return *this;
  }
  /// A text of less than 32 bytes.
  Expected& text(std::string_view value) {
    byte({0xa0 + static_cast<int>(value.size())});
    bytes_.insert(bytes_.end(), value.begin(), value.end());
    return *this;
  }
  /// 16 bytes, all the same.
  Expected& hash(int value) {
    byte({0xc4, 16});
    for (int i = 0; i < 16; ++i) byte({value});
    return *this;
  }
  [[nodiscard]] const Bytes& bytes() const { return bytes_; }

 private:
  Bytes bytes_;
};

Digest hash(std::uint8_t value) {
  Digest digest;
  digest.bytes.fill(value);
  return digest;
}

// 1.5 is 0x3ff8000000000000.
Expected batch_of(int events) {
  return Expected().byte({0x92, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x90 + events});
}

KvEventBatch with(std::vector<KvEvent> events) { return {1.5, std::move(events)}; }

void expect_both_ways(const KvEventBatch& batch, KvEventEncoding encoding, const Bytes& expected) {
  EXPECT_EQ(encode_kv_events(batch, encoding), expected);
  const auto read = decode_kv_events(expected);
  ASSERT_TRUE(read.has_value()) << read.error().to_string();
  EXPECT_EQ(*read, batch);
}

TEST(KvEventsTest, StoredBlocksAreAMapOfVllmsFields) {
  Expected expected = batch_of(1);
  expected.byte({0x8b});
  expected.text("type").text("BlockStored");
  expected.text("block_hashes").byte({0x92}).hash(0x11).hash(0x22);
  expected.text("parent_block_hash").hash(0x33);
  expected.text("token_ids").byte({0x90});
  expected.text("block_size").byte({0x10});
  expected.text("lora_id").byte({0xc0});
  expected.text("medium").text("CPU");
  expected.text("lora_name").byte({0xc0});
  expected.text("group_idx").byte({0x01});
  expected.text("kv_cache_spec_kind").text("sliding_window");
  expected.text("kv_cache_spec_sliding_window").byte({0xcd, 0x04, 0x00});
  expect_both_ways(with({KvStored{.hashes = {hash(0x11), hash(0x22)},
                                  .before = hash(0x33),
                                  .tokens_per_block = 16,
                                  .group = GroupId{1},
                                  .group_kind = "sliding_window",
                                  .window_tokens = 1024}}),
                   KvEventEncoding::kMaps, expected.bytes());
}

TEST(KvEventsTest, StoredBlocksAreAnArrayInVllmsOrderForOlderSubscribers) {
  Expected expected = batch_of(1);
  expected.byte({0x9b}).text("BlockStored");
  expected.byte({0x91}).hash(0x11);  // block_hashes
  expected.byte({0xc0});             // parent_block_hash
  expected.byte({0x90});             // token_ids
  expected.byte({0xcc, 0x80});       // block_size
  expected.byte({0xc0});             // lora_id
  expected.text("CPU");              // medium
  expected.byte({0xc0, 0xc0});       // lora_name, extra_keys
  expected.byte({0x00});             // group_idx
  expected.text("full_attention");   // kv_cache_spec_kind
  expect_both_ways(with({KvStored{.hashes = {hash(0x11)},
                                  .before = {},
                                  .tokens_per_block = 128,
                                  .group = GroupId{0},
                                  .group_kind = "full_attention"}}),
                   KvEventEncoding::kArrays, expected.bytes());
}

TEST(KvEventsTest, WhatIsNotKnownOfAGroupIsLeftOut) {
  Expected expected = batch_of(1);
  expected.byte({0x89});
  expected.text("type").text("BlockStored");
  expected.text("block_hashes").byte({0x91}).hash(0x11);
  expected.text("parent_block_hash").byte({0xc0});
  expected.text("token_ids").byte({0x90});
  expected.text("block_size").byte({0x00});
  expected.text("lora_id").byte({0xc0});
  expected.text("medium").text("CPU");
  expected.text("lora_name").byte({0xc0});
  expected.text("group_idx").byte({0x00});
  expect_both_ways(
      with({KvStored{.hashes = {hash(0x11)}, .before = {}, .group = {}, .group_kind = {}}}),
      KvEventEncoding::kMaps, expected.bytes());
}

TEST(KvEventsTest, RemovedAndClearedBlocksAreMaps) {
  Expected expected = batch_of(2);
  expected.byte({0x84});
  expected.text("type").text("BlockRemoved");
  expected.text("block_hashes").byte({0x91}).hash(0x44);
  expected.text("medium").text("CPU");
  expected.text("group_idx").byte({0x02});
  expected.byte({0x81}).text("type").text("AllBlocksCleared");
  expect_both_ways(with({KvRemoved{{hash(0x44)}, GroupId{2}}, KvCleared{}}), KvEventEncoding::kMaps,
                   expected.bytes());
}

TEST(KvEventsTest, RemovedAndClearedBlocksAreArraysForOlderSubscribers) {
  Expected expected = batch_of(2);
  expected.byte({0x94}).text("BlockRemoved");
  expected.byte({0x91}).hash(0x44);
  expected.text("CPU").byte({0x02});
  expected.byte({0x91}).text("AllBlocksCleared");
  expect_both_ways(with({KvRemoved{{hash(0x44)}, GroupId{2}}, KvCleared{}}),
                   KvEventEncoding::kArrays, expected.bytes());
}

TEST(KvEventsTest, ManyHashesGetALongCount) {
  const KvEventBatch batch = with({KvRemoved{std::vector<Digest>(300, hash(0x55)), GroupId{0}}});
  Expected expected = batch_of(1);
  expected.byte({0x94}).text("BlockRemoved").byte({0xdc, 0x01, 0x2c});
  for (int i = 0; i < 300; ++i) expected.hash(0x55);
  expected.text("CPU").byte({0x00});
  expect_both_ways(batch, KvEventEncoding::kArrays, expected.bytes());
}

TEST(KvEventsTest, FieldsThatCameLaterAndARankAreSkipped) {
  Expected bytes;
  bytes.byte({0x93, 0x0a, 0x92});  // a whole number of seconds
  bytes.byte({0x85}).text("type").text("BlockRemoved");
  bytes.text("locality").byte({0x82}).text("a").byte({0x92, 0xc3, 0xca, 0, 0, 0, 0});
  bytes.text("b").byte({0xd4, 0x01, 0x02});
  bytes.text("medium").byte({0xc0});
  bytes.text("block_hashes").byte({0x91}).hash(0x66);
  bytes.text("group_idx").byte({0xc0});
  bytes.byte({0x92}).text("SomethingNew").byte({0xd9, 0x02, 'h', 'i'});
  bytes.byte({0x00});  // data_parallel_rank
  const auto read = decode_kv_events(bytes.bytes());
  ASSERT_TRUE(read.has_value()) << read.error().to_string();
  EXPECT_EQ(*read, (KvEventBatch{10, {KvRemoved{{hash(0x66)}, GroupId{0}}}}));
}

TEST(KvEventsTest, EveryTruncationIsRefused) {
  const KvEventBatch batch = with({KvStored{.hashes = {hash(1), hash(2)},
                                            .before = hash(3),
                                            .tokens_per_block = 16,
                                            .group = GroupId{1},
                                            .group_kind = "mamba",
                                            .window_tokens = 70'000},
                                   KvRemoved{{hash(4)}, GroupId{0}}, KvCleared{}});
  for (const auto encoding : {KvEventEncoding::kMaps, KvEventEncoding::kArrays}) {
    Bytes bytes = encode_kv_events(batch, encoding);
    EXPECT_EQ(decode_kv_events(bytes).value_or(KvEventBatch{}), batch);
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      const auto read = decode_kv_events(std::span(bytes).first(size));
      ASSERT_FALSE(read.has_value()) << size;
      EXPECT_EQ(read.error().code, ErrorCode::kProtocol);
    }
    bytes.push_back(0xc0);
    EXPECT_FALSE(decode_kv_events(bytes).has_value()) << "left over";
  }
}

TEST(KvEventsTest, WhatIsNoBatchIsRefused) {
  const auto refused = [](const Expected& bytes) {
    return !decode_kv_events(bytes.bytes()).has_value();
  };
  EXPECT_TRUE(refused(Expected().byte({0x80})));              // a map
  EXPECT_TRUE(refused(Expected().byte({0x91, 0x01})));        // no events
  EXPECT_TRUE(refused(Expected().byte({0x92, 0xc0, 0x90})));  // no time
  EXPECT_TRUE(refused(batch_of(1).byte({0x90})));             // an event without a type
  EXPECT_TRUE(refused(batch_of(1).byte({0x81}).text("medium").text("CPU")));
  EXPECT_TRUE(refused(batch_of(1).byte({0x91}).text("BlockStored")));  // no hashes
  // A hash that is a number, as vLLM may be told to send them, and one of another length.
  EXPECT_TRUE(refused(batch_of(1).byte({0x92}).text("BlockRemoved").byte({0x91, 0x07})));
  EXPECT_TRUE(refused(batch_of(1).byte({0x92}).text("BlockRemoved").byte({0x91, 0xc4, 1, 0})));
  EXPECT_TRUE(refused(Expected().byte({0x92, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff})));
}

TEST(KvEventsTest, ATopicTellsEngineNamespaceRootAndModel) {
  const KvTopic topic{"chat", "tenant/7@eu", Digest::from_words(1, 2), "meta-llama/Llama 3\n"};
  const std::string text = topic.text();
  EXPECT_EQ(text, "kv@chat/tenant%2F7%40eu/" + topic.root.hex() + "@meta-llama%2FLlama%203%0A");
  const auto parsed = KvTopic::parse(text);
  ASSERT_TRUE(parsed.has_value()) << parsed.error().to_string();
  EXPECT_EQ(*parsed, topic);
  for (const char* other : {"", "kv-events", "kv@chat@model", "kv@chat/default/12@model",
                            "kv@chat/a%2/00000000000000000000000000000000@m"}) {
    EXPECT_FALSE(KvTopic::parse(other).has_value()) << other;
  }
}

TEST(KvEventsTest, EndpointsArePathsOrPorts) {
  for (const char* good : {"ipc:///tmp/events", "tcp://127.0.0.1:5557", "tcp://*:5557",
                           "tcp://[::1]:5557", "tcp://0.0.0.0:0"}) {
    EXPECT_TRUE(check_kv_endpoint(good, true).has_value()) << good;
  }
  for (const char* bad : {"", "ipc://relative", "/tmp/events", "tcp://127.0.0.1", "tcp://:5557",
                          "tcp://127.0.0.1:65536", "tcp://127.0.0.1:5557x", "inproc://events"}) {
    EXPECT_FALSE(check_kv_endpoint(bad, true).has_value()) << bad;
  }
  EXPECT_FALSE(check_kv_endpoint("tcp://router:5557", true).has_value());
  EXPECT_TRUE(check_kv_endpoint("tcp://router:5557", false).has_value());
  EXPECT_FALSE(check_kv_endpoint("ipc:///" + std::string(200, 'x'), true).has_value());
}

}  // namespace
}  // namespace kvferry::ipc
