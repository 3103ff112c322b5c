// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/messages.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// Checksums that a manager may be killed before it has noted them: what was told lately, and what
/// is computed after its death. The next manager asks for them. Of one place in the pool it is the
/// last one that counts, so that they take no more memory than twice what the pool has places, and
/// kMost at the most. @threading one thread.
class KeptSums {
 public:
  /// The oldest ones go first: as much as a mover may have to compute, and what a manager has not
  /// read yet.
  static constexpr std::size_t kMost = std::size_t{3} << 16;
  static constexpr std::size_t kMostInMessage = 4096;
  /// Fewer than these are not looked through for places that have another one by now.
  static constexpr std::size_t kFew = 1024;

  /// Of one store; none, where it has no sums any more.
  void add(const std::vector<ipc::KeptSum>& sums);
  /// A manager asks. queued: stores that have been answered so far, all lives together
  /// (PoolChecks::sums_queued()); those of them that add() has not been called for are told later.
  void tell(std::uint64_t queued);
  /// add() has been called for all of so many.
  [[nodiscard]] bool has_all(std::uint64_t queued) const noexcept { return stores_ >= queued; }
  /// What is to be sent next.
  [[nodiscard]] std::optional<ipc::KeptSums> next();
  /// Nobody asks any more.
  void stop_telling() { asked_.reset(); }
  /// What they are of is gone.
  void forget();
  [[nodiscard]] std::size_t size() const noexcept { return sums_.size(); }

 private:
  void drop_replaced();

  std::deque<ipc::KeptSum> sums_;
  std::size_t many_ = kFew;   ///< From so many on those that are replaced are dropped.
  std::uint64_t stores_ = 0;  ///< That add() was called for.
  struct Asked {
    std::uint64_t queued = 0;
    std::size_t told = 0;  ///< Of those in sums_, from the first one.
  };
  std::optional<Asked> asked_;
};

}  // namespace kvferry::cache_manager
