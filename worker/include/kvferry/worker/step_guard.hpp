// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <chrono>
#include <exception>
#include <new>
#include <optional>
#include <utility>

/// For an engine's step loop: a step that fails takes nothing with it but its own requests.
namespace kvferry::worker {

/// Runs step(), which returns an ipc::Status, and makes an error of whatever it throws: an
/// ipc::Exception's own, kNoHostMemory for std::bad_alloc, kSystem for anything else, also what is
/// no std::exception.
template <typename Step> [[nodiscard]] ipc::Status guard_step(Step&& step) {
  try {
    return std::forward<Step>(step)();
  } catch (const ipc::Exception& thrown) {
    return thrown.error();
  } catch (const std::bad_alloc&) {
    return KVFERRY_ERROR(kNoHostMemory,
                         "the step ran out of the process's memory: make its batch smaller, or "
                         "look who else uses the host's memory");
  } catch (const std::exception& thrown) {
    return KVFERRY_ERROR(kSystem, "the step threw: {}", thrown.what());
  } catch (...) {
    return KVFERRY_ERROR(kSystem, "the step threw what is no std::exception");
  }
}

/// Whether a failed step is followed by emptying the caching allocator: always when device memory
/// ran out, otherwise at most once in kPeriod, so that requests that fail cannot force a
/// synchronisation of the device each.
/// @threading one thread at a time.
class FailureRule {
 public:
  static constexpr ipc::Duration kPeriod = std::chrono::seconds(1);

  /// True: empty it now; that is remembered.
  [[nodiscard]] bool empties(const ipc::Error& error,
                             ipc::TimePoint now = ipc::MonotonicClock::now()) {
    const bool out_of_memory = error.code == ipc::ErrorCode::kNoDeviceMemory;
    if (!out_of_memory && emptied_at_ && now - *emptied_at_ < kPeriod) return false;
    emptied_at_ = now;
    return true;
  }

 private:
  std::optional<ipc::TimePoint> emptied_at_;
};

}  // namespace kvferry::worker
