// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/compute_activity.hpp"

#include <limits>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kSharedBytes = 64;
constexpr std::uint64_t kNever = 0;  ///< As the memory begins.
constexpr std::uint64_t kNow = std::numeric_limits<std::uint64_t>::max();

/// kNever, kNow, or when it last did, in nanoseconds of the monotonic clock.
std::uint64_t& word_of(const SharedMapping& mapping) noexcept {
  return *reinterpret_cast<std::uint64_t*>(mapping.data());
}

std::uint64_t nanoseconds(TimePoint when) noexcept {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count());
}

}  // namespace

ComputeActivity::ComputeActivity() {
  auto segment = SharedMemory::create_single_writer("kvferry-activity", kSharedBytes);
  if (!segment) throw Exception(std::move(segment).error());
  segment_ = std::move(segment).value();
}

void ComputeActivity::begin() noexcept {
  const std::lock_guard lock(mutex_);
  if (running_++ > 0) return;
  std::atomic_ref(word_of(segment_.mapping)).store(kNow, std::memory_order_relaxed);
}

void ComputeActivity::end() noexcept {
  const std::lock_guard lock(mutex_);
  if (--running_ > 0) return;
  std::atomic_ref(word_of(segment_.mapping))
      .store(nanoseconds(MonotonicClock::now()), std::memory_order_relaxed);
}

Result<ComputeActivityView> ComputeActivityView::map(const UniqueFd& fd) {
  KVFERRY_ASSIGN(SharedMapping mapping, SharedMemory::map_single_writer(fd, kSharedBytes));
  return ComputeActivityView(std::move(mapping));
}

std::optional<bool> ComputeActivityView::is_computing(TimePoint now) const noexcept {
  const std::uint64_t word = std::atomic_ref(word_of(mapping_)).load(std::memory_order_relaxed);
  if (word == kNever) return std::nullopt;
  if (word == kNow) return true;
  const std::uint64_t at = nanoseconds(now);
  return at < word || at - word < nanoseconds(TimePoint(kLately));
}

}  // namespace kvferry::ipc
