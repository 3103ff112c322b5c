// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

TEST(MemoryTagsTest, AreASetWithNames) {
  MemoryTags tags;
  EXPECT_TRUE(tags.empty());
  EXPECT_EQ(to_string(tags), "nothing");
  for (const MemoryTag tag : kMemoryTags) {
    EXPECT_FALSE(tags.has(tag));
    tags.add(tag);
    EXPECT_TRUE(tags.has(tag));
  }
  EXPECT_EQ(tags, MemoryTags::all());
  EXPECT_EQ(to_string(tags), "kv_cache, weights, scratch");
  tags.remove(MemoryTag::kWeights);
  EXPECT_EQ(tags, (MemoryTags{MemoryTag::kKvCache, MemoryTag::kScratch}));
  EXPECT_EQ(MemoryTags::all() - tags, MemoryTags{MemoryTag::kWeights});
  EXPECT_EQ((MemoryTags::all() - tags) | tags, MemoryTags::all());
}

struct Bits {
  std::uint8_t bits = 0;
  template <typename V> void visit(V& v) { v(bits); }
};

TEST(MemoryTagsTest, OfAnotherVersionAreToldFromOurs) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const auto tags =
        decode<MemoryTags>(encode(Bits{static_cast<std::uint8_t>(bits)}), "MemoryTags");
    ASSERT_TRUE(tags.has_value());
    EXPECT_EQ(tags->check().has_value(), bits < 8) << bits;
  }
}

}  // namespace
}  // namespace kvferry::ipc
