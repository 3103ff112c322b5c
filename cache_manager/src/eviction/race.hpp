// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace kvferry::cache_manager {

/// What several policies have to say in what a cache does, by what each would have found lately.
///
/// All have a say that sinks with how much less they found than the best one, in deviations of the
/// requests' differences, and that those other than LRU have as far as they are likely to find more
/// than it: what a model that has seen little takes for worth keeping can be what has just ended,
/// and LRU has no such loss to make good. Requests are counted, not blocks, and old ones less.
///
/// One leads, and has some more to say. It begins as LRU, and another one leads once it found more
/// by more than chance explains. And whatever that says: once the cache itself has found less than
/// what a simple policy did by more than a small part of all blocks, that one does, so that a loss
/// does not grow beyond that part.
/// @threading one thread.
class Race {
 public:
  static constexpr std::size_t kMost = 6;
  static constexpr std::size_t kLru = 1;  ///< Its number.
  using Says = std::array<double, kMost>;

  /// The policy of number 0 is not a simple one: it needs less to be believed in than the others,
  /// as it is the one that gets better.
  /// @param capacity of the cache, in blocks @param count of policies, at most kMost
  Race(std::size_t capacity, std::size_t count);

  /// A request. @param hits blocks that each policy would have found @param found by the cache
  /// @param blocks that the request has
  void add(std::span<const std::size_t> hits, std::size_t found, std::size_t blocks);
  [[nodiscard]] std::size_t leader() const { return leader_; }
  /// Of each policy; 0 for those that there are not.
  [[nodiscard]] Says says() const;

 private:
  using Sums = std::array<double, kMost>;

  /// By how many deviations one found more than the other lately.
  [[nodiscard]] double more(std::size_t one, std::size_t other) const;

  double capacity_;
  std::size_t count_;
  std::size_t leader_ = kLru;
  Sums lately_{};                             ///< Hits more than number 0's.
  std::array<Sums, kMost> lately_squares_{};  ///< Of each pair's differences.
  double blocks_ = 0;
  Sums missed_{};          ///< Hits more than the cache's.
  Sums missed_squares_{};  ///< Of each request's.
};

}  // namespace kvferry::cache_manager
