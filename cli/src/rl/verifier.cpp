// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/verifier.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kMostComplaints = 5;

}  // namespace

Verifier::Verifier(const std::vector<ipc::Generate>& prompts,
                   std::function<void(const std::string&)> say)
    : prompts_(prompts), say_(std::move(say)) {}

void Verifier::take(std::size_t prompt, const ipc::GenerateReply& reply, AnswerCounts& more) {
  const AnswerCounts before = counts_;
  counts_.cached_tokens += reply.cached_tokens;
  counts_.retracted += reply.admissions > 0 ? reply.admissions - 1 : 0;
  if (reply.end == ipc::GenerateEnd::kAborted) {
    ++counts_.aborted;
  } else {
    ++counts_.finished;
    const bool whole = reply.tokens.size() == prompts_[prompt].max_tokens;
    if (reply.weights_first != reply.weights_last) {
      ++counts_.mixed;
      if (!whole) complain(prompt, reply, {});
    } else if (!whole) {
      complain(prompt, reply, {});
    } else {
      const auto [known, is_new] = first_.try_emplace({prompt, reply.weights_first}, reply.tokens);
      if (!is_new && known->second == reply.tokens) ++counts_.verified;
      if (known->second != reply.tokens) complain(prompt, reply, known->second);
    }
  }
  more.finished += counts_.finished - before.finished;
  more.aborted += counts_.aborted - before.aborted;
  more.retracted += counts_.retracted - before.retracted;
  more.mixed += counts_.mixed - before.mixed;
  more.verified += counts_.verified - before.verified;
  more.corrupt += counts_.corrupt - before.corrupt;
  more.cached_tokens += counts_.cached_tokens - before.cached_tokens;
}

void Verifier::complain(std::size_t prompt,
                        const ipc::GenerateReply& reply,
                        const std::vector<std::uint32_t>& first) {
  if (++counts_.corrupt > kMostComplaints) return;
  const std::string who = fmt::format("corrupt answer to prompt {} under weights {}", prompt,
                                      reply.weights_first.hex());
  const std::uint32_t wanted = prompts_[prompt].max_tokens;
  if (reply.tokens.size() != wanted) {
    say_(fmt::format("{}: {} tokens, {} were asked for", who, reply.tokens.size(), wanted));
    return;
  }
  const auto [ours, theirs] =
      std::mismatch(reply.tokens.begin(), reply.tokens.end(), first.begin());
  say_(
      fmt::format("{}: token {} of {} is {}, first it was {} (admitted {} times, {} of {} prompt "
                  "tokens from the cache)",
                  who, ours - reply.tokens.begin(), wanted, *ours, *theirs, reply.admissions,
                  reply.cached_tokens, prompts_[prompt].prompt.size()));
}

// Entries of one prompt are neighbours: the map is in their order.
std::uint64_t Verifier::compared_prompts() const {
  std::uint64_t compared = 0;
  for (auto entry = first_.begin(); entry != first_.end();) {
    const auto next = first_.lower_bound({entry->first.first + 1, {}});
    compared += std::distance(entry, next) > 1 ? 1U : 0U;
    entry = next;
  }
  return compared;
}

std::uint64_t Verifier::equal_prompts() const {
  std::uint64_t equal = 0;
  for (auto entry = first_.begin(); entry != first_.end();) {
    const auto next = first_.lower_bound({entry->first.first + 1, {}});
    const bool all_equal = std::all_of(
        entry, next, [&entry](const auto& other) { return other.second == entry->second; });
    equal += std::distance(entry, next) > 1 && all_equal ? 1U : 0U;
    entry = next;
  }
  return equal;
}

}  // namespace kvferry::cli
