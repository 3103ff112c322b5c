// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/sequence_store.hpp"

#include <gtest/gtest.h>

#include <memory>

namespace kvferry::cache_manager {
namespace {

using ipc::GroupId;

class SequenceStoreTest : public testing::Test {
 protected:
  static ipc::Digest digest(std::uint64_t value) { return ipc::Digest::from_words(7, value); }
  static SequenceKey key(std::uint64_t owner, std::uint64_t handle, std::uint32_t engine = 1) {
    return {engine, digest(owner), handle};
  }
  HostBlockRef block() {
    SlabShape shape;
    shape.bytes.shard_bytes = 4096;
    return std::make_shared<const HostBlock>(pool_, *pool_.allocate(shape));
  }
  /// Puts one block at (group 0, index 0).
  void put(const SequenceKey& at, const ipc::Digest& fingerprint) {
    const SequenceStore::Life life = sequences_.open(at, fingerprint);
    EXPECT_TRUE(sequences_.put(at, life, GroupId{0}, 0, block()));
  }
  [[nodiscard]] bool has(const SequenceKey& at) const {
    return sequences_.find(at, GroupId{0}, 0) != nullptr;
  }

  ipc::Digest geometry_ = digest(100);
  HostPool pool_{1U << 20U};
  SequenceStore sequences_;
};

TEST_F(SequenceStoreTest, BlocksOfALateSwapOutDoNotComeBackAfterADrop) {
  const SequenceStore::Life life = sequences_.open(key(1, 42), geometry_);
  EXPECT_TRUE(sequences_.put(key(1, 42), life, GroupId{0}, 0, block()));
  EXPECT_TRUE(has(key(1, 42)));
  EXPECT_TRUE(sequences_.drop(key(1, 42)));
  EXPECT_FALSE(sequences_.drop(key(1, 42)));
  EXPECT_FALSE(sequences_.put(key(1, 42), life, GroupId{0}, 1, block()));
  EXPECT_NE(sequences_.open(key(1, 42), geometry_), life);
  EXPECT_EQ(pool_.stats().blocks, 0U);
}

TEST_F(SequenceStoreTest, DeadOwnersSequencesGo) {
  put(key(1, 1), geometry_);
  put(key(2, 2), geometry_);
  sequences_.drop_owner(digest(1));
  EXPECT_FALSE(has(key(1, 1)));
  EXPECT_TRUE(has(key(2, 2)));
  EXPECT_EQ(sequences_.blocks(), 1U);
  EXPECT_EQ(pool_.stats().blocks, 1U);
}

TEST_F(SequenceStoreTest, OneHandleOfTwoOwnersIsTwoSequences) {
  put(key(1, 7), geometry_);
  EXPECT_FALSE(has(key(2, 7)));
  EXPECT_FALSE(sequences_.drop(key(2, 7)));
  put(key(2, 7), geometry_);
  EXPECT_EQ(sequences_.sequences(), 2U);
  sequences_.drop_owner(digest(1));
  EXPECT_FALSE(has(key(1, 7)));
  EXPECT_TRUE(has(key(2, 7)));
}

TEST_F(SequenceStoreTest, SequencesOfAnotherGeometryGoAndOtherEnginesKeepTheirs) {
  put(key(1, 1, 1), geometry_);
  put(key(1, 2, 1), digest(101));
  put(key(1, 1, 2), geometry_);
  const SequenceStore::Life under_way = sequences_.open(key(1, 3, 1), geometry_);
  EXPECT_EQ(sequences_.drop_other_geometries(1, digest(101)), 2U);
  EXPECT_FALSE(has(key(1, 1, 1)));
  EXPECT_TRUE(has(key(1, 2, 1)));
  EXPECT_TRUE(has(key(1, 1, 2)));
  EXPECT_FALSE(sequences_.put(key(1, 3, 1), under_way, GroupId{0}, 0, block()))
      << "a swap-out that ends after the change has nowhere to go";
}

}  // namespace
}  // namespace kvferry::cache_manager
