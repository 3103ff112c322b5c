// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <utility>

namespace kvferry::ipc {

/// The arena's user, and the allocator beside it: emptied when the regions are gone and before
/// anybody is told, whoever asked for the clear. Remembers, so that nobody empties it twice for
/// one.
class EmptyingUser final : public ArenaUser {
 public:
  EmptyingUser(ArenaUser& user, EmptyAllocator empty_allocator)
      : user_(user), empty_allocator_(std::move(empty_allocator)) {}

  Status on_mapped(SessionId session, Arena& arena, ArenaContents contents) override {
    freed_at_ = TimePoint();  // What went before is no part of a clear of this one.
    return user_.on_mapped(session, arena, contents);
  }
  Status quiesce(Epoch epoch, Deadline deadline) override { return user_.quiesce(epoch, deadline); }
  void on_unmapped(Epoch epoch) override { user_.on_unmapped(epoch); }
  void on_freed(Epoch epoch) override {
    user_.on_freed(epoch);
    empty_for_clear();
    freed_at_ = MonotonicClock::now();
  }

  /// Whether the regions went, and it was emptied for that, during the clear whose order is being
  /// obeyed. Their owner may have been told first: then its revocation is here before the order.
  /// Once.
  [[nodiscard]] bool take_emptied_for_clear() {
    return MonotonicClock::now() - freed_at_.exchange(TimePoint()) < kSameClear;
  }
  void empty_for_clear() const { (void)empty(EmptyReason::kClear); }
  /// Nothing was reserved where there is no allocator. Logs what it came to. Any thread.
  [[nodiscard]] Result<EmptiedCache> empty(EmptyReason reason) const {
    if (!empty_allocator_) return EmptiedCache{};
    KVFERRY_ASSIGN(const EmptiedCache emptied, empty_or_warn(empty_allocator_, reason));
    log_info("{}: reserved {} -> {} (freed {})", to_string(reason),
             format_size(emptied.reserved_before), format_size(emptied.reserved_after),
             format_size(emptied.freed()));
    return emptied;
  }
  [[nodiscard]] bool has_allocator() const noexcept { return empty_allocator_ != nullptr; }

 private:
  /// What went longer ago went for another reason, such as the owner's death.
  static constexpr Duration kSameClear = std::chrono::seconds(5);

  ArenaUser& user_;
  const EmptyAllocator empty_allocator_;
  std::atomic<TimePoint> freed_at_{TimePoint()};
};

}  // namespace kvferry::ipc
