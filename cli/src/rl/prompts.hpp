// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/generation_messages.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// The prompts of an RL loop: twice as many as one iteration takes, drawn anew for each, so that
/// every one comes back under every version of the weights. Several begin alike, as samples of one
/// task do; lengths vary. Every second one asks for a long answer, which is still being written
/// when the others are done.
class PromptSet {
 public:
  /// Repeats exactly from its arguments. @pre both counts > 0.
  PromptSet(std::uint64_t seed, std::uint32_t per_iteration, std::uint32_t tokens_per_block);

  [[nodiscard]] const std::vector<ipc::Generate>& all() const noexcept { return prompts_; }
  /// Which of them an iteration asks for, each at most once.
  [[nodiscard]] std::vector<std::size_t> of_iteration(std::uint32_t iteration) const;

  /// Blocks of the longest sequence, with its answer.
  [[nodiscard]] std::uint32_t longest_blocks() const noexcept { return longest_blocks_; }
  /// Blocks of all of them, with their answers, at most.
  [[nodiscard]] std::uint64_t total_blocks() const noexcept { return total_blocks_; }

 private:
  const std::uint64_t seed_;
  const std::uint32_t per_iteration_;
  std::vector<ipc::Generate> prompts_;
  std::uint32_t longest_blocks_ = 0;
  std::uint64_t total_blocks_ = 0;
};

}  // namespace kvferry::cli
