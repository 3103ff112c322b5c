// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

/// Whether a worker's device computes, told to those who copy beside it: words in shared memory
/// that only the worker can write. A hint: nothing but the way of copying depends on it.
namespace kvferry::ipc {

/// The worker's side. @threading any.
class ComputeActivity {
 public:
  /// Throws Exception when there can be no shared memory.
  ComputeActivity();
  ComputeActivity(const ComputeActivity&) = delete;
  ComputeActivity& operator=(const ComputeActivity&) = delete;
  ~ComputeActivity() = default;

  /// Some work begins or ends; several may run at a time.
  void begin(TimePoint now = MonotonicClock::now()) noexcept;
  void end(TimePoint now = MonotonicClock::now()) noexcept;
  /// To be sent to whoever looks.
  [[nodiscard]] const UniqueFd& fd() const noexcept { return segment_.fd; }

 private:
  SharedMemory::SingleWriter segment_;
  std::mutex mutex_;  ///< Guards what follows, and the words against a second writer.
  std::uint32_t running_ = 0;
  TimePoint changed_at_{};  ///< From running to not, or back.
  /// Of the time until then in which it ran: what is longer ago than kLately counts little.
  double share_ = 0;
};

/// Another process's side.
class ComputeActivityView {
 public:
  /// Work ends and begins all the time, step by step: it goes on for so long after its end.
  static constexpr std::chrono::milliseconds kLately{50};

  /// kProtocol for a descriptor of anything else.
  [[nodiscard]] static Result<ComputeActivityView> map(const UniqueFd& fd);
  /// It does, or did within kLately. Nothing when the worker has never told.
  [[nodiscard]] std::optional<bool> is_computing(TimePoint now) const noexcept;
  /// It does, or is between two steps of the many that took most of the time lately. Not between
  /// the few steps of a worker that waits for its loads more than it computes.
  [[nodiscard]] std::optional<bool> is_mostly_computing(TimePoint now) const noexcept;

 private:
  explicit ComputeActivityView(SharedMapping mapping) : mapping_(std::move(mapping)) {}
  SharedMapping mapping_;
};

}  // namespace kvferry::ipc
