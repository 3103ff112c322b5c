// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <optional>

namespace kvferry::ipc::lease {

/// Whether the memory of the current epoch has been zeroed, as its owner knows it.
///
///     state       event                          next
///     any         begin, own user zeroes         prepared by lease 0
///     any         begin, own user does not       unprepared
///     unprepared  grant of lease n               preparing (n): the grant says that n has to
///     prepared    grant of lease n               prepared: the grant says by whom it was
///     preparing   n says that it has             prepared by n
///     preparing   lease n ends                   unprepared: whoever is next begins anew
///     any         another lease says or ends     the same
///
/// So what was zeroed half-way is zeroed again, and what was zeroed never is.
/// @threading the owner's lease thread.
class PrepareMark {
 public:
  enum class State : std::uint8_t { kUnprepared = 1, kPreparing, kPrepared };

  /// A new epoch.
  void begin(bool by_owner) noexcept {
    state_ = by_owner ? State::kPrepared : State::kUnprepared;
    lease_ = LeaseId{};
  }
  /// What the grant of this lease says: the lease under which the memory was zeroed (0: by the
  /// owner); nothing: its holder has to.
  /// @pre nobody is preparing.
  [[nodiscard]] std::optional<LeaseId> grant(LeaseId lease) {
    KVFERRY_CHECK(state_ != State::kPreparing, "two processes would zero one epoch");
    if (state_ == State::kPrepared) return lease_;
    state_ = State::kPreparing;
    lease_ = lease;
    return std::nullopt;
  }
  /// The holder of the lease says that its zeroing was observed complete. True: the mark changed.
  bool acknowledge(LeaseId lease) noexcept {
    if (state_ != State::kPreparing || lease != lease_) return false;
    state_ = State::kPrepared;
    return true;
  }
  /// The lease ended, after its last word was read. True: the mark changed.
  bool ended(LeaseId lease) noexcept {
    if (state_ != State::kPreparing || lease != lease_) return false;
    begin(false);
    return true;
  }

  [[nodiscard]] State state() const noexcept { return state_; }
  /// 0: not prepared, or by the owner itself.
  [[nodiscard]] LeaseId prepared_by() const noexcept {
    return state_ == State::kPrepared ? lease_ : LeaseId{};
  }

 private:
  State state_ = State::kUnprepared;
  LeaseId lease_;  ///< Preparing: who; prepared: who has.
};

}  // namespace kvferry::ipc::lease
