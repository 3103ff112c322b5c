// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "mover/calibrator.hpp"
#include "mover/pool_checks.hpp"
#include "mover/transfer_lane.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace kvferry::cache_manager {

/// The mover's use of the arena: admits jobs for the mapped epoch and moves their blocks, loads and
/// stores side by side. Every admitted or refused job is answered exactly once.
/// @threading any.
class TransferEngine final : public ipc::ArenaUser {
 public:
  struct Options {
    CopyStrategy strategy = CopyStrategy::kAuto;
    StagingClient::Options staging;
    /// kAuto only: strategies are chosen by what copies cost.
    std::optional<Calibrator::Options> calibration = std::nullopt;
    ipc::TransitionLog transitions = {};
    std::chrono::milliseconds device_hang = kDeviceHang;  ///< TransferLane::Options.
    std::uint64_t store_bytes_per_second = 0;             ///< Likewise.
    std::uint64_t load_bytes_per_second = 0;
    std::uint64_t agent_swap_bytes = 0;  ///< StrategyChooser, as the next one.
    std::uint32_t gathered_percent = 0;
    UrgentLoads urgent_loads = UrgentLoads::kAuto;
    PoolChecks::Summed on_sums = [](const ipc::MoverSums&, const std::vector<ipc::KeptSum>&) {};
  };

  TransferEngine(ipc::Device& device,
                 Options options,
                 TransferLane::Done done,
                 std::function<void(const ipc::Error&)> device_failed);
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;
  ~TransferEngine() override;

  void submit(ipc::MoverJob job);
  void cancel(ipc::JobId job);

  /// The pool of the manager that is connected now.
  void set_pool(std::shared_ptr<ipc::PoolMapping> pool);
  /// The manager is lost: queued jobs end, running ones finish; the pool goes with the last of
  /// them. Checksums of what was stored go on for as long as the caller has the pool.
  void drop_pool();
  /// PoolChecks.
  [[nodiscard]] std::uint64_t sums_queued() const noexcept { return checks_.sums_queued(); }
  void sum_at_once(bool at_once) { checks_.sum_at_once(at_once); }
  [[nodiscard]] bool idle();

  ipc::Status on_mapped(ipc::SessionId session,
                        ipc::Arena& arena,
                        ipc::ArenaContents contents) override;
  ipc::Status quiesce(ipc::Epoch epoch, ipc::Deadline deadline) override;
  void on_unmapped(ipc::Epoch epoch) override;

 private:
  /// No job of ours uses the device, and the worker does not compute, as far as is known.
  [[nodiscard]] bool is_quiet();
  void admit(ipc::MoverJob job);  ///< @pre mutex_ is held.
  void refuse(const ipc::MoverJob& job, const ipc::Error& error);

  ipc::Device& device_;
  Options options_;
  TransferLane::Done done_;

  std::mutex mutex_;  // guards arena_, pool_, admitting_
  std::shared_ptr<const MappedArena> arena_;
  std::shared_ptr<ipc::PoolMapping> pool_;
  bool admitting_ = false;

  std::atomic<std::uint64_t> submitted_ = 0;
  PoolChecks checks_;
  TransferLane stores_;  // with the next two last: their threads use all above
  TransferLane loads_;
  std::optional<Calibrator> calibrator_;  // after the lanes, which it looks at
};

}  // namespace kvferry::cache_manager
