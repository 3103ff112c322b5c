// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "run/leak_check.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cli {

/// Free memory of one device around one clear: as kvferry's ranks reported it, and as this process,
/// which is none of them, read it from kernel or driver.
struct DeviceClear {
  std::string device;
  std::uint64_t seen_before = 0;
  std::uint64_t seen_after = 0;
  std::uint64_t reported_before = 0;
  std::uint64_t reported_after = 0;
  std::uint64_t arena_bytes = 0;  ///< What the clear had to give back here.
};

/// One clear.
struct ClearMemory {
  std::vector<DeviceClear> devices;
  bool quarantined = false;  ///< Memory waited for a peer, so less than the arena may be back.
  /// A process of the run ended or started meanwhile: its own memory is in the figures, too.
  bool disturbed = false;
};

/// What all clears of a run amount to.
struct ClearMemorySummary {
  std::uint64_t given_back = 0;          ///< Seen from outside, over all clears.
  std::uint64_t largest_difference = 0;  ///< Reported free after a clear against seen.
  std::uint64_t short_clears = 0;        ///< Gave back less than the arena, without a quarantine.
};

/// Watches the devices around every clear of a replay.
/// @threading one thread.
class ClearMemoryLog {
 public:
  /// `rank_devices` and `arena_bytes` are those of each rank; the probe outlives this.
  ClearMemoryLog(const DeviceProbe& probe,
                 const std::vector<ipc::DeviceSpec>& rank_devices,
                 std::uint64_t arena_bytes);

  /// Right before a clear is asked for.
  void before_clear();
  /// Right after its answer, before the re-init is asked for.
  void after_clear(const ipc::ClearReply& reply, bool quarantined);
  /// A process of the run ended or started.
  void note_process_change() noexcept { disturbed_ = true; }

  [[nodiscard]] const std::vector<ClearMemory>& clears() const noexcept { return clears_; }

 private:
  const DeviceProbe& probe_;
  std::vector<std::string> rank_devices_;
  std::uint64_t arena_bytes_ = 0;
  std::vector<DeviceFree> before_;
  bool disturbed_ = false;
  std::vector<ClearMemory> clears_;
};

[[nodiscard]] ClearMemorySummary summarize_clears(const std::vector<ClearMemory>& clears);

}  // namespace kvferry::cli
