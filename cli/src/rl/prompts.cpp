// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/prompts.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "rl/mix.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvferry::cli {
namespace {

constexpr std::uint32_t kVocabulary = 32'000;
constexpr std::uint32_t kPromptsPerStem = 4;
constexpr std::uint32_t kMostStemBlocks = 5;
constexpr std::uint32_t kMostTailBlocks = 2;
constexpr std::uint32_t kShortAnswer = 4;
constexpr std::uint32_t kLongAnswer = 64;

void append_tokens(std::vector<std::uint32_t>& prompt, std::uint32_t count, Mix& mix) {
  for (std::uint32_t i = 0; i < count; ++i) prompt.push_back(mix.below(kVocabulary));
}

}  // namespace

PromptSet::PromptSet(std::uint64_t seed,
                     std::uint32_t per_iteration,
                     std::uint32_t tokens_per_block)
    : seed_(seed), per_iteration_(per_iteration) {
  KVFERRY_CHECK(per_iteration > 0 && tokens_per_block > 0, "no prompts or no tokens in a block");
  Mix mix(seed);
  const std::uint32_t count = 2 * per_iteration;
  std::vector<std::vector<std::uint32_t>> stems((count + kPromptsPerStem - 1) / kPromptsPerStem);
  for (auto& stem : stems) {
    append_tokens(stem, (1 + mix.below(kMostStemBlocks)) * tokens_per_block, mix);
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    ipc::Generate request;
    request.prompt = stems[i % stems.size()];
    append_tokens(request.prompt, 1 + mix.below(kMostTailBlocks * tokens_per_block), mix);
    const std::uint32_t least = i % 2 == 0 ? kShortAnswer : kLongAnswer;
    request.max_tokens = least + mix.below(least);
    const auto tokens = static_cast<std::uint32_t>(request.prompt.size()) + request.max_tokens;
    const std::uint32_t blocks = (tokens + tokens_per_block - 1) / tokens_per_block;
    longest_blocks_ = std::max(longest_blocks_, blocks);
    total_blocks_ += blocks;
    prompts_.push_back(std::move(request));
  }
}

std::vector<std::size_t> PromptSet::of_iteration(std::uint32_t iteration) const {
  std::vector<std::size_t> drawn(prompts_.size());
  std::iota(drawn.begin(), drawn.end(), std::size_t{0});
  Mix mix(seed_ ^ ((iteration + 1ULL) << 32U));
  for (std::uint32_t i = 0; i < per_iteration_; ++i) {
    const auto rest = static_cast<std::uint32_t>(drawn.size() - i);
    std::swap(drawn[i], drawn[i + mix.below(rest)]);
  }
  drawn.resize(per_iteration_);
  return drawn;
}

}  // namespace kvferry::cli
