// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// What the answers of a run came to.
struct AnswerCounts {
  std::uint64_t finished = 0;       ///< With all tokens that were asked for.
  std::uint64_t aborted = 0;        ///< By a pause.
  std::uint64_t retracted = 0;      ///< Times that a request got its blocks anew.
  std::uint64_t mixed = 0;          ///< Finished with other weights than they began with.
  std::uint64_t verified = 0;       ///< Equal to what was first answered under the same weights.
  std::uint64_t corrupt = 0;        ///< Not equal to it, or not of the length that was asked for.
  std::uint64_t cached_tokens = 0;  ///< Of prompts, found in the cache.
};

/// Holds answers to each other: what a model says is a function of prompt and weights alone, so
/// whatever was flushed, swapped, cleared or retracted on the way, the same prompt under the same
/// weights gets the same answer. Also looks whether other weights give other answers, without which
/// that would prove nothing.
/// @threading one thread.
class Verifier {
 public:
  /// say: told of each of the first corrupt answers. @lifetime the prompts outlive this.
  Verifier(const std::vector<ipc::Generate>& prompts, std::function<void(const std::string&)> say);

  /// An answer to prompt number `prompt`; adds it to the counts of all, and to `more`.
  void take(std::size_t prompt, const ipc::GenerateReply& reply, AnswerCounts& more);

  [[nodiscard]] const AnswerCounts& counts() const noexcept { return counts_; }
  /// Prompts that were answered under several weights, and those of them with one answer for all.
  [[nodiscard]] std::uint64_t compared_prompts() const;
  [[nodiscard]] std::uint64_t equal_prompts() const;

 private:
  void complain(std::size_t prompt,
                const ipc::GenerateReply& reply,
                const std::vector<std::uint32_t>& first);

  const std::vector<ipc::Generate>& prompts_;
  std::function<void(const std::string&)> say_;
  AnswerCounts counts_;
  /// What was first answered, by prompt and identity of the weights.
  std::map<std::pair<std::size_t, ipc::Digest>, std::vector<std::uint32_t>> first_;
};

}  // namespace kvferry::cli
