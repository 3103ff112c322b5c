// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace kvferry::ipc {

/// The arena's user, and the allocator beside it: emptied when the regions are gone and before
/// anybody is told, whoever asked for the clear. Counts, so that nobody empties it twice.
class EmptyingUser final : public ArenaUser {
 public:
  EmptyingUser(ArenaUser& user, std::function<void()> empty_allocator)
      : user_(user), empty_allocator_(std::move(empty_allocator)) {}

  Status on_mapped(SessionId session, Arena& arena, ArenaContents contents) override {
    return user_.on_mapped(session, arena, contents);
  }
  Status quiesce(Epoch epoch, Deadline deadline) override { return user_.quiesce(epoch, deadline); }
  void on_unmapped(Epoch epoch) override { user_.on_unmapped(epoch); }
  void on_freed(Epoch epoch) override {
    user_.on_freed(epoch);
    empty();
  }

  void empty() {
    if (empty_allocator_) empty_allocator_();
    ++times_;
  }
  [[nodiscard]] std::uint64_t times() const noexcept { return times_; }
  [[nodiscard]] bool has_allocator() const noexcept { return empty_allocator_ != nullptr; }

 private:
  ArenaUser& user_;
  const std::function<void()> empty_allocator_;
  std::atomic<std::uint64_t> times_{0};
};

}  // namespace kvferry::ipc
