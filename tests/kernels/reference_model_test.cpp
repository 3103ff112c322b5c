// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/reference_model.hpp"

#include "kernels/random_pass.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <set>
#include <vector>

namespace kvferry::kernels {
namespace {

constexpr std::uint32_t kLayouts = 300;

/// A pass, byte by byte and from the definitions alone.
struct Expectation {
  Expectation(RandomLayout& layout, RandomPass& random_pass)
      : arena(layout.arena), outputs(random_pass.outputs) {
    const std::uint64_t tokens = random_pass.tokens_per_block;
    for (std::uint32_t w = 0; w < random_pass.write_count(); ++w) {
      const TokenWrite& write = random_pass.writes[w];
      for (std::size_t r = 0; r < layout.regions.size(); ++r) {
        const std::uint64_t salt = layout.regions[r].salt;
        for (std::uint64_t b = 0;; ++b) {
          const std::uint64_t at = write.first_token * layout.regions[r].block_bytes / tokens + b;
          if (at >= (write.first_token + write.tokens) * layout.regions[r].block_bytes / tokens) {
            break;
          }
          const std::uint64_t weight = random_pass.model[(b / 8 + salt) % 1024];
          byte(layout, r, write.block, at) = static_cast<unsigned char>(
              pattern_word(write.input ^ weight, salt, b / 8) >> (8 * (b % 8)));
        }
      }
    }
    for (std::uint32_t n = 0; n < random_pass.read_count(); ++n) {
      const TokenRead& read = random_pass.reads[n];
      if (read.sequence >= outputs.size()) continue;
      for (std::size_t r = 0; r < layout.regions.size(); ++r) {
        const std::uint64_t salt = layout.regions[r].salt;
        const std::uint64_t bytes = layout.regions[r].block_bytes;
        std::vector<std::uint64_t> words;
        const std::uint64_t begin = read.first_token * bytes / tokens;
        for (std::uint64_t at = begin; at < (read.first_token + read.tokens) * bytes / tokens;
             ++at) {
          if ((at - begin) % 8 == 0) words.push_back(0);
          words.back() |= std::uint64_t{byte(layout, r, read.block, at)}
                          << (8 * ((at - begin) % 8));
        }
        for (std::size_t i = 0; i < words.size(); ++i) {
          outputs[read.sequence] += attend_term(
              words[i], random_pass.model[1024 + (i + salt) % 1024], read.position, salt, i);
        }
      }
    }
  }

  unsigned char& byte(RandomLayout& layout,
                      std::size_t region,
                      std::uint32_t block,
                      std::uint64_t offset) {
    return arena[static_cast<std::size_t>(layout.slice(region, block) - layout.arena.data()) +
                 offset];
  }

  std::vector<unsigned char> arena;
  std::vector<std::uint64_t> outputs;
};

TEST(ReferenceModelTest, PassesFollowTheDefinitionAndTouchNothingElse) {
  std::uint64_t writes = 0;
  std::uint64_t reads = 0;
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    // Every third one with slices of more words than a table has.
    RandomLayout layout(seed, seed % 3 == 0 ? LayoutShape{2, 20'000, 4, 1} : LayoutShape{});
    RandomPass random_pass(layout);
    const Expectation expected(layout, random_pass);
    host::decode(layout.regions.data(), layout.region_count(), random_pass.pass());
    ASSERT_EQ(layout.arena, expected.arena) << seed;
    ASSERT_EQ(random_pass.outputs, expected.outputs) << seed;
    writes += random_pass.write_count();
    reads += random_pass.read_count();
  }
  EXPECT_GT(writes, 10 * kLayouts);
  EXPECT_GT(reads, 10 * kLayouts);
}

/// One block of two regions with 13 bytes per token, of which one token was written by the pass
/// and all are read.
struct SmallPass {
  SmallPass() : memory(2 * 1024), model(2 * kModelWords) {
    std::mt19937_64 random(5);
    for (unsigned char& byte : memory) byte = static_cast<unsigned char>(random());
    for (std::uint64_t& word : model) word = random();
  }

  std::vector<std::uint64_t> run() {
    std::vector<std::uint64_t> outputs(2);
    std::vector<unsigned char> copy = memory;
    const std::array<StridedRegion, 2> regions = {
        StridedRegion{copy.data(), 208, 208, 0, salts[0]},
        StridedRegion{copy.data() + 1024, 208, 208, 0, salts[1]}};
    const std::array<std::uint32_t, 2> counts = {1, 1};
    host::decode(
        regions.data(), 2,
        {counts.data(), &write, &read, model.data(), outputs.data(), 1, 1, 2, tokens_per_block});
    return outputs;
  }

  std::vector<unsigned char> memory;
  std::vector<std::uint64_t> model;
  std::array<std::uint64_t, 2> salts = {3, 4};
  std::uint32_t tokens_per_block = 16;
  TokenWrite write{77, 1, 4, 1, 0};
  TokenRead read{0, 1, 9, 0, 16, 0};
};

TEST(ReferenceModelTest, EveryInputChangesTheAnswer) {
  const std::vector<std::function<void(SmallPass&)>> changes = {
      [](SmallPass& pass) { pass.write.input ^= 1; },
      [](SmallPass& pass) { pass.write.block = 0; },
      [](SmallPass& pass) { pass.write.first_token = 5; },
      [](SmallPass& pass) { pass.write.tokens = 2; },
      [](SmallPass& pass) { pass.read.sequence = 1; },
      [](SmallPass& pass) { pass.read.block = 0; },
      [](SmallPass& pass) { pass.read.position = 10; },
      [](SmallPass& pass) { pass.read.tokens = 15; },
      [](SmallPass& pass) { pass.read = {0, 1, 9, 1, 15, 0}; },
      [](SmallPass& pass) { pass.salts[0] = 5; },
      [](SmallPass& pass) { std::swap(pass.salts[0], pass.salts[1]); },
      [](SmallPass& pass) { pass.tokens_per_block = 17; },
      // Tables: words that this pass uses, by the salts of its regions.
      [](SmallPass& pass) { pass.model[3] ^= 1ULL << 63; },
      [](SmallPass& pass) { pass.model[kModelWords + 3] ^= 1; },
      [](SmallPass& pass) { pass.model[kModelWords + 4 + 25] ^= 1ULL << 63; },
      // KV: the first byte of the block that is read, and the last one of either region.
      [](SmallPass& pass) { pass.memory[208] ^= 1; },
      [](SmallPass& pass) { pass.memory[415] ^= 0x80; },
      [](SmallPass& pass) { pass.memory[1024 + 415] ^= 0x80; },
      [](SmallPass& pass) { std::swap(pass.memory[220], pass.memory[300]); },
  };
  std::set<std::vector<std::uint64_t>> answers = {SmallPass().run()};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    SmallPass changed;
    changes[i](changed);
    EXPECT_TRUE(answers.insert(changed.run()).second) << "change " << i;
  }
  // And what the pass does not use changes nothing.
  SmallPass same;
  same.memory[0] ^= 1;             // another block
  same.memory[416] ^= 1;           // behind the one that is read
  same.memory[208 + 4 * 13] ^= 1;  // written before it is read
  same.model[100] ^= 1;            // no word of the token has that weight
  same.model[kModelWords + 200] ^= 1;
  EXPECT_EQ(same.run(), SmallPass().run());
}

TEST(ReferenceModelTest, TermsDifferWhenAnyOneBitOfAnArgumentDoes) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t word = random();
    const std::uint64_t weight = random();
    const auto position = static_cast<std::uint32_t>(random());
    const std::uint64_t salt = random();
    const std::uint64_t i = random() >> 20;
    const std::uint64_t term = attend_term(word, weight, position, salt, i);
    const std::uint64_t folded = fold_term(word, i, salt);
    const std::uint64_t expanded = expand_word(word, i);
    for (unsigned bit = 0; bit < 64; ++bit) {
      const std::uint64_t flip = 1ULL << bit;
      EXPECT_NE(attend_term(word ^ flip, weight, position, salt, i), term);
      EXPECT_NE(attend_term(word, weight ^ flip, position, salt, i), term);
      EXPECT_NE(attend_term(word, weight, position, salt ^ flip, i), term);
      EXPECT_NE(attend_term(word, weight, position, salt, i ^ flip), term);
      EXPECT_NE(attend_term(word, weight, position ^ (1U << (bit % 32)), salt, i), term);
      EXPECT_NE(fold_term(word ^ flip, i, salt), folded);
      EXPECT_NE(fold_term(word, i ^ flip, salt), folded);
      EXPECT_NE(fold_term(word, i, salt ^ flip), folded);
      EXPECT_NE(expand_word(word ^ flip, i), expanded);
      EXPECT_NE(expand_word(word, i ^ flip), expanded);
    }
  }
}

TEST(ReferenceModelTest, BlocksOfTheMostTokensAreWrittenAndReadToTheirEnd) {
  std::vector<unsigned char> memory(3 * kMaxTokensPerBlock + 8, 0xEE);
  const StridedRegion region{memory.data() + 1, 3 * kMaxTokensPerBlock, 3 * kMaxTokensPerBlock, 0,
                             1};
  std::vector<std::uint64_t> model(2 * kModelWords, 6);
  std::uint64_t output = 0;
  const TokenWrite write{8, 0, 0, kMaxTokensPerBlock, 0};
  const TokenRead read{0, 0, 0, kMaxTokensPerBlock - 1, 1, 0};
  const std::array<std::uint32_t, 2> counts = {1, 1};
  host::decode(&region, 1,
               {counts.data(), &write, &read, model.data(), &output, 1, 1, 1, kMaxTokensPerBlock});
  EXPECT_EQ(memory.front(), 0xEE);
  EXPECT_EQ(memory[3 * kMaxTokensPerBlock + 1], 0xEE);
  const std::uint64_t last = pattern_word(8 ^ 6, 1, 3 * kMaxTokensPerBlock / 8 - 1);
  EXPECT_EQ(memory[3 * kMaxTokensPerBlock], static_cast<unsigned char>(last >> 56));
  EXPECT_EQ(output, attend_term(last >> 40, 6, 0, 1, 0));
}

std::vector<std::uint64_t> words_of(const std::vector<unsigned char>& bytes) {
  std::vector<std::uint64_t> words((bytes.size() + 7) / 8);
  for (std::size_t b = 0; b < bytes.size(); ++b) {
    words[b / 8] |= std::uint64_t{bytes[b]} << (8 * (b % 8));
  }
  return words;
}

std::vector<unsigned char> random_bytes(std::mt19937_64& random, std::uint64_t size) {
  std::vector<unsigned char> bytes(size);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

TEST(ReferenceModelTest, FoldAddsEveryWordToItsSum) {
  std::mt19937_64 random(21);
  for (const std::uint64_t size :
       std::vector<std::uint64_t>{0, 1, 7, 8, 9, 8191, 8192, 8193, 70'001}) {
    const auto bytes = random_bytes(random, size);
    const std::uint64_t seed = random();
    std::vector<std::uint64_t> sums(kModelWords);
    for (std::uint64_t& sum : sums) sum = random();
    std::vector<std::uint64_t> expected = sums;
    const auto words = words_of(bytes);
    for (std::size_t i = 0; i < words.size(); ++i) {
      expected[i % 1024] += fold_term(words[i], i, seed);
    }
    host::fold(bytes.data(), size, seed, sums.data());
    EXPECT_EQ(sums, expected) << size;
  }
}

TEST(ReferenceModelTest, ExpandFillsExactlyTheTargetFromAllOfTheSource) {
  std::mt19937_64 random(22);
  for (const std::uint64_t source_bytes : std::vector<std::uint64_t>{1, 8, 13, 8192, 8195}) {
    for (const std::uint64_t target_bytes : std::vector<std::uint64_t>{0, 1, 8, 31, 8192, 50'003}) {
      const auto source = random_bytes(random, source_bytes);
      const auto words = words_of(source);
      std::vector<unsigned char> target(target_bytes + 2, 0xEE);
      std::vector<unsigned char> expected = target;
      for (std::uint64_t b = 0; b < target_bytes; ++b) {
        const std::uint64_t word = expand_word(words[b / 8 % words.size()], b / 8);
        expected[b + 1] = static_cast<unsigned char>(word >> (8 * (b % 8)));
      }
      host::expand(source.data(), source_bytes, target.data() + 1, target_bytes);
      EXPECT_EQ(target, expected) << source_bytes << " to " << target_bytes;
    }
  }
}

}  // namespace
}  // namespace kvferry::kernels
