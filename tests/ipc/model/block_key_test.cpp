// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/block_key.hpp"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string_view>

namespace kvferry::ipc {
namespace {

ModelIdentity identity() {
  return ModelIdentity{"default", "llama", Digest::from_words(1, 2), Digest::from_words(3, 4)};
}

TEST(ModelIdentityTest, RootDiffersForEveryField) {
  std::set<Digest> seen = {identity().root()};
  ModelIdentity other = identity();
  other.name_space = "another";
  EXPECT_TRUE(seen.insert(other.root()).second);
  other = identity();
  other.model = "qwen";
  EXPECT_TRUE(seen.insert(other.root()).second);
  other = identity();
  other.fingerprint = Digest::from_words(1, 3);
  EXPECT_TRUE(seen.insert(other.root()).second);
  other = identity();
  other.unit_blocks = 4;
  EXPECT_TRUE(seen.insert(other.root()).second);
  other = identity();
  other.weights = Digest::from_words(3, 5);
  EXPECT_TRUE(seen.insert(other.root()).second);
  EXPECT_EQ(identity().root(), identity().root());
}

TEST(ModelIdentityTest, AKeyOfTheNamespaceMakesAnotherRootForEveryKey) {
  std::set<Digest> seen = {identity().root()};
  ModelIdentity keyed = identity();
  keyed.name_space_key = Digest();
  EXPECT_TRUE(seen.insert(keyed.root()).second) << "of zeros is one, too";
  keyed.name_space_key = Digest::from_words(7, 7);
  EXPECT_TRUE(seen.insert(keyed.root()).second);
  EXPECT_EQ(keyed.root().hex(), "5ddcdf5758b1c103ec5766cfe17ab0a1");
  keyed.name_space_key = Digest::from_words(7, 8);
  EXPECT_TRUE(seen.insert(keyed.root()).second);
  keyed.name_space = "another";
  EXPECT_TRUE(seen.insert(keyed.root()).second) << "one key for two namespaces";
}

TEST(ModelIdentityTest, NeighbouringTextsDoNotRunTogether) {
  ModelIdentity a = identity();
  a.name_space = "ab";
  a.model = "c";
  ModelIdentity b = identity();
  b.name_space = "a";
  b.model = "bc";
  EXPECT_NE(a.root(), b.root());
}

TEST(ModelIdentityTest, FingerprintAndWeightsAreNotInterchangeable) {
  ModelIdentity swapped = identity();
  std::swap(swapped.fingerprint, swapped.weights);
  EXPECT_NE(swapped.root(), identity().root());
}

TEST(ChainBlockHashTest, DependsOnParentTokensAndTheirNumber) {
  const std::array<std::uint32_t, 4> tokens = {1, 2, 3, 4};
  const Digest parent;
  const Digest first = chain_block_hash(parent, tokens.data(), sizeof(tokens));
  EXPECT_EQ(first, chain_block_hash(parent, tokens.data(), sizeof(tokens)));
  EXPECT_NE(first, chain_block_hash(first, tokens.data(), sizeof(tokens)));
  EXPECT_NE(first, chain_block_hash(parent, tokens.data(), sizeof(tokens) - 4));
  std::array<std::uint32_t, 4> other = tokens;
  other[3] ^= 1;
  EXPECT_NE(first, chain_block_hash(parent, other.data(), sizeof(other)));
  EXPECT_NE(chain_block_hash(parent, nullptr, 0), parent);
}

TEST(ChainBlockHashTest, EqualsTheSameHashInEveryBuild) {
  constexpr std::string_view kTokens = "0123456789abcdef";
  EXPECT_EQ(chain_block_hash(Digest{}, kTokens.data(), kTokens.size()).hex(),
            "48ddc42114385553ed9849a4d89f7d7a");
  EXPECT_EQ(identity().root().hex(), "38a2b43a6c6d8611873af02c9b1626e5");
}

TEST(BlockKeyTest, GroupsOfOneBlockAreDifferentKeys) {
  const Digest root = identity().root();
  const BlockKey main{root, Digest::from_words(5, 6), GroupId{0}};
  const BlockKey draft{root, Digest::from_words(5, 6), GroupId{1}};
  EXPECT_NE(main, draft);
  EXPECT_NE(std::hash<BlockKey>{}(main), std::hash<BlockKey>{}(draft));
}

}  // namespace
}  // namespace kvferry::ipc
