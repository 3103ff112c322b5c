// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/compute_activity.hpp"

#include <cmath>
#include <limits>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kSharedBytes = 64;
constexpr std::uint64_t kNever = 0;  ///< As the memory begins.
constexpr std::uint64_t kNow = std::numeric_limits<std::uint64_t>::max();

/// In nanoseconds of the monotonic clock.
struct ActivityWords {
  std::uint64_t computed_at;   ///< kNever, kNow, or when it last did.
  std::uint64_t mostly_until;  ///< If nothing runs before.
};
static_assert(sizeof(ActivityWords) <= kSharedBytes);

ActivityWords& words_of(const SharedMapping& mapping) noexcept {
  return *reinterpret_cast<ActivityWords*>(mapping.data());
}

void write_word(std::uint64_t& word, std::uint64_t value) noexcept {
  std::atomic_ref(word).store(value, std::memory_order_relaxed);
}

std::uint64_t read_word(std::uint64_t& word) noexcept {
  return std::atomic_ref(word).load(std::memory_order_relaxed);
}

std::uint64_t nanoseconds(TimePoint when) noexcept {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch()).count());
}

/// Of what is known of a time that is so long ago.
double part_left(Duration elapsed) noexcept {
  using Seconds = std::chrono::duration<double>;
  return std::exp(-Seconds(elapsed).count() / Seconds(ComputeActivityView::kLately).count());
}

}  // namespace

ComputeActivity::ComputeActivity() {
  auto segment = SharedMemory::create_single_writer("kvferry-activity", kSharedBytes);
  if (!segment) throw Exception(std::move(segment).error());
  segment_ = std::move(segment).value();
}

void ComputeActivity::begin(TimePoint now) noexcept {
  const std::lock_guard lock(mutex_);
  if (running_++ > 0) return;
  share_ *= part_left(now - changed_at_);
  changed_at_ = now;
  write_word(words_of(segment_.mapping).computed_at, kNow);
}

void ComputeActivity::end(TimePoint now) noexcept {
  const std::lock_guard lock(mutex_);
  if (--running_ > 0) return;
  share_ = 1 - (1 - share_) * part_left(now - changed_at_);
  changed_at_ = now;
  // Until the share has sunk to a half.
  const double most = 2 * share_;
  const Duration kept = ComputeActivityView::kLately;
  const double left_ns = most > 1 ? std::log(most) * static_cast<double>(kept.count()) : 0;
  ActivityWords& words = words_of(segment_.mapping);
  write_word(words.mostly_until, nanoseconds(now) + static_cast<std::uint64_t>(left_ns));
  write_word(words.computed_at, nanoseconds(now));
}

Result<ComputeActivityView> ComputeActivityView::map(const UniqueFd& fd) {
  KVFERRY_ASSIGN(SharedMapping mapping, SharedMemory::map_single_writer(fd, kSharedBytes));
  return ComputeActivityView(std::move(mapping));
}

std::optional<bool> ComputeActivityView::is_computing(TimePoint now) const noexcept {
  const std::uint64_t word = read_word(words_of(mapping_).computed_at);
  if (word == kNever) return std::nullopt;
  if (word == kNow) return true;
  const std::uint64_t at = nanoseconds(now);
  return at < word || at - word < nanoseconds(TimePoint(kLately));
}

std::optional<bool> ComputeActivityView::is_mostly_computing(TimePoint now) const noexcept {
  ActivityWords& words = words_of(mapping_);
  const std::uint64_t word = read_word(words.computed_at);
  if (word == kNever) return std::nullopt;
  return word == kNow || nanoseconds(now) < read_word(words.mostly_until);
}

}  // namespace kvferry::ipc
