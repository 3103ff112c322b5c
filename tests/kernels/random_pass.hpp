// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/random_layout.hpp"
#include "kvferry/kernels/reference_model.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace kvferry::kernels {

/// A pass over blocks of a layout: writes that meet within a word, reads of any tokens, of
/// sequences that exist and some that do not.
struct RandomPass {
  explicit RandomPass(RandomLayout& layout)
      : RandomPass(layout, std::array{1U, 2U, 7U, 16U, 64U, 100U}[layout.draw(0, 5)]) {}

  RandomPass(RandomLayout& layout, std::uint32_t tokens)
      : tokens_per_block(tokens), model(2 * kModelWords), outputs(layout.draw(1, 9)) {
    for (std::uint64_t& word : model) word = layout.draw_word();
    for (std::uint64_t& word : outputs) word = layout.draw_word();
    for (const std::uint32_t block : layout.draw_ids()) {
      for (std::uint32_t token = layout.draw(0, 3); token < tokens_per_block;) {
        const std::uint32_t count = std::min(layout.draw(0, 20), tokens_per_block - token);
        writes.push_back({layout.draw_word(), block, token, count, 0});
        token += std::max(count, 1U);
      }
    }
    std::shuffle(writes.begin(), writes.end(), layout.random);
    for (std::uint32_t left = layout.draw(0, 60); left > 0; --left) {
      TokenRead read;
      read.sequence = layout.draw(0, static_cast<int>(outputs.size()));
      read.block =
          static_cast<std::uint32_t>(layout.draw(std::uint64_t{0}, layout.block_count - 1));
      read.position = layout.draw(0, 1000);
      read.first_token = layout.draw(0, static_cast<int>(tokens_per_block) - 1);
      read.tokens = layout.draw(0, static_cast<int>(tokens_per_block - read.first_token));
      reads.push_back(read);
    }
    // More than there is, all, or some of it.
    counts = {static_cast<std::uint32_t>(writes.size()), static_cast<std::uint32_t>(reads.size())};
    for (std::uint32_t& count : counts) {
      const std::uint32_t kind = layout.draw(0, 3);
      if (kind == 0) count += layout.draw(1, 1000);
      if (kind == 1) count = layout.draw(0, static_cast<int>(count));
    }
  }

  [[nodiscard]] std::uint32_t write_count() const {
    return std::min(counts[0], static_cast<std::uint32_t>(writes.size()));
  }
  [[nodiscard]] std::uint32_t read_count() const {
    return std::min(counts[1], static_cast<std::uint32_t>(reads.size()));
  }

  [[nodiscard]] DecodePass pass() {
    DecodePass out;
    out.counts = counts.data();
    out.writes = writes.data();
    out.reads = reads.data();
    out.model = model.data();
    out.outputs = outputs.data();
    out.max_writes = static_cast<std::uint32_t>(writes.size());
    out.max_reads = static_cast<std::uint32_t>(reads.size());
    out.max_sequences = static_cast<std::uint32_t>(outputs.size());
    out.tokens_per_block = tokens_per_block;
    return out;
  }

  std::uint32_t tokens_per_block;
  std::array<std::uint32_t, 2> counts{};
  std::vector<TokenWrite> writes;
  std::vector<TokenRead> reads;
  std::vector<std::uint64_t> model;
  std::vector<std::uint64_t> outputs;
};

}  // namespace kvferry::kernels
