// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/transfer_engine.hpp"

#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "mover/staging_fit.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Status;

/// An engine's own regions may lie in one allocation at one distance, or not, whatever their order
/// is called: the figures are of what rows they have.
ipc::ArenaOrder measured_order(const ipc::ArenaLayout& layout) {
  return has_slice_rows(layout) ? ipc::ArenaOrder::kLayerFirst : ipc::ArenaOrder::kLayerFirstMany;
}

TransferLane::Options lane_options(ipc::CopyDirection direction,
                                   std::uint32_t lane,
                                   const TransferEngine::Options& engine) {
  StagingClient::Options staging = engine.staging;
  staging.lane = lane;
  const bool stores = direction == ipc::CopyDirection::kDeviceToHost;
  return {direction,
          std::move(staging),
          lane,
          engine.transitions,
          engine.device_hang,
          stores ? engine.store_bytes_per_second : engine.load_bytes_per_second,
          engine.urgent_loads};
}

}  // namespace

ipc::Result<CopyStrategy> choose_strategy(CopyStrategy asked, const ipc::ArenaLayout& layout) {
  const bool block_first = layout.order == ipc::ArenaOrder::kBlockFirst;
  switch (asked) {
    case CopyStrategy::kDirect:
      if (!block_first) {
        return KVFERRY_ERROR(kInvalidArgument,
                             "copy strategy direct needs a block-first arena, this one is {}; use "
                             "--arena block-first or --copy-strategy auto",
                             ipc::to_string(layout.order));
      }
      return asked;
    case CopyStrategy::kStaged:
      if (!can_stage(layout)) {
        return KVFERRY_ERROR(
            kInvalidArgument,
            "copy strategy staged needs at least 2 staging slots that hold a whole "
            "block, the arena has {} of {}; raise --staging-slots and "
            "--staging-slot-bytes or use --copy-strategy auto",
            layout.staging.slots, ipc::format_size(layout.staging.slot_bytes));
      }
      return asked;
    case CopyStrategy::kStrided:
    case CopyStrategy::kBatch:
    case CopyStrategy::kMemcpy:
    case CopyStrategy::kKernel:
    case CopyStrategy::kAgent: return asked;
    case CopyStrategy::kAuto: break;
  }
  return strategy_by_rule(layout);
}

TransferEngine::TransferEngine(ipc::Device& device,
                               Options options,
                               TransferLane::Done done,
                               std::function<void(const ipc::Error&)> device_failed)
    : device_(device),
      options_(std::move(options)),
      done_(std::move(done)),
      checks_(done_, options_.on_sums, [this] { loads_.look_again(); }),
      stores_(
          device,
          lane_options(ipc::CopyDirection::kDeviceToHost, 0, options_),
          [this](ipc::MoverJobDone answer) { checks_.finish(std::move(answer)); },
          device_failed),
      loads_(
          device,
          lane_options(ipc::CopyDirection::kHostToDevice, 1, options_),
          [this](ipc::MoverJobDone answer) { checks_.finish(std::move(answer)); },
          device_failed) {
  if (!options_.calibration || options_.strategy != CopyStrategy::kAuto) return;
  calibrator_.emplace(
      device_, *options_.calibration, [this] { return is_quiet(); },
      [this] { return submitted_.load(std::memory_order_relaxed); });
}

// Its threads call the lanes, and lanes' threads it: it stays until they are gone.
TransferEngine::~TransferEngine() { checks_.stop(); }

void TransferEngine::submit(ipc::MoverJob job) {
  submitted_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    if (admitting_ && pool_ && arena_->session == job.session &&
        arena_->arena->epoch() == job.epoch) {
      // Under the lock, so that quiesce finds in the queues whatever was admitted before it.
      return admit(std::move(job));
    }
    if (admitting_ && pool_) {
      const auto error = KVFERRY_ERROR(kStaleEpoch,
                                       "job {} names epoch {} of session {}, current is "
                                       "epoch {} of session {}",
                                       job.job.value, job.epoch.value, job.session.hex(),
                                       arena_->arena->epoch().value, arena_->session.hex());
      refuse(job, error);
      return;
    }
  }
  refuse(job, KVFERRY_ERROR(kNotReady, "job {}: no arena is mapped here, or it is being cleared",
                            job.job.value));
}

void TransferEngine::admit(ipc::MoverJob job) {
  const ipc::TransitionFields fields{
      .session = job.session, .epoch = job.epoch, .job = job.job, .detail = job.items.size()};
  if (const Status planned = options_.transitions.attempt(ipc::Transition::kMoverAdmit, fields);
      !planned) {
    refuse(job, planned.error());
    return;
  }
  auto check = checks_.begin(job, pool_, arena_->parts);
  if (!check) return refuse(job, check.error());
  TransferLane& lane = job.direction == ipc::CopyDirection::kDeviceToHost ? stores_ : loads_;
  lane.submit(
      LaneJob{std::move(job), arena_, pool_, ipc::MonotonicClock::now(), std::move(check).value()});
}

void TransferEngine::refuse(const ipc::MoverJob& job, const ipc::Error& error) {
  ipc::log_debug("job refused: {}", error.to_string());
  ipc::MoverJobDone result;
  result.job = job.job;
  result.results.assign(job.items.size(), static_cast<std::uint8_t>(error.code));
  result.message = error.message;
  options_.transitions.record(ipc::Transition::kMoverAnswer,
                              {.job = job.job, .detail = job.items.size()});
  done_(std::move(result));
}

void TransferEngine::cancel(ipc::JobId job) {
  stores_.cancel(job);
  loads_.cancel(job);
}

void TransferEngine::set_pool(std::shared_ptr<ipc::PoolMapping> pool) {
  {
    const std::lock_guard lock(mutex_);
    pool_.swap(pool);
  }
  // The last one is unpinned here, not under the lock: that takes 14 ms per GiB, and quiesce() must
  // not wait for it.
}

void TransferEngine::drop_pool() {
  std::shared_ptr<ipc::PoolMapping> dropped;  // unpinned at the end, outside the lock
  {
    const std::lock_guard lock(mutex_);
    dropped.swap(pool_);
  }
  for (TransferLane* lane : {&stores_, &loads_}) {
    lane->revoke(ipc::ErrorCode::kCancelled);
    lane->take_pool_back();
  }
}

// What is measured beside compute would be taken for an idle device's.
bool TransferEngine::is_quiet() { return idle() && !loads_.is_computing().value_or(false); }

bool TransferEngine::idle() { return stores_.idle() && loads_.idle() && checks_.idle(); }

Status TransferEngine::on_mapped(ipc::SessionId session,
                                 ipc::Arena& arena,
                                 ipc::ArenaContents /*contents*/) {
  KVFERRY_ASSIGN(const CopyStrategy strategy, choose_strategy(options_.strategy, arena.layout()));
  auto mapped = std::make_shared<MappedArena>(arena);
  mapped->session = session;
  mapped->strategy = strategy;
  ipc::log_info("epoch {} mapped: {} at strategy {}", arena.epoch().value,
                ipc::format_size(arena.total_bytes()), to_string(strategy));
  // A block of a block-first arena is one copy: there is nothing to choose.
  if (options_.strategy == CopyStrategy::kAuto && strategy != CopyStrategy::kDirect) {
    mapped->chooser = std::make_shared<StrategyChooser>(
        strategy, arena.layout(),
        StrategyChooser::Options{options_.agent_swap_bytes, options_.gathered_percent});
    if (calibrator_) {
      if (arena.layout().staging.slots > 0) loads_.greet();
      calibrator_->start(mapped->chooser, measured_order(arena.layout()));
    }
  }
  if (strategy == CopyStrategy::kKernel) KVFERRY_TRY(mapped->make_tables(device_));
  const std::lock_guard lock(mutex_);
  arena_ = std::move(mapped);
  admitting_ = true;
  return ipc::ok();
}

Status TransferEngine::quiesce(ipc::Epoch epoch, ipc::Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    admitting_ = false;
  }
  stores_.revoke(ipc::ErrorCode::kRevoked);
  loads_.revoke(ipc::ErrorCode::kRevoked);
  if (ipc::is_mutant("drains_without_waiting")) return ipc::ok();
  // Its memory of the device would look as if it were the arena's.
  if (calibrator_) KVFERRY_TRY(calibrator_->stop(deadline));
  for (TransferLane* lane : {&stores_, &loads_}) {
    // wait: both lanes; deadline, of the drain; the failure of the device
    if (const Status idle = lane->wait_idle(deadline); !idle) {
      return ipc::Error{idle.error().code,
                        fmt::format("epoch {}: {}", epoch.value, idle.error().message)};
    }
  }
  return ipc::ok();
}

void TransferEngine::on_unmapped(ipc::Epoch /*epoch*/) {
  const std::lock_guard lock(mutex_);
  admitting_ = false;
  arena_.reset();
}

}  // namespace kvferry::cache_manager
