// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker_arena.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "make_stream.hpp"

#include <poll.h>

#include <algorithm>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Epoch;
using ipc::RegionSet;
using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""s;

namespace {

constexpr std::array kSets{RegionSet::kAll, RegionSet::kSharded, RegionSet::kReplicated};

void wait_readable(int fd, Deadline deadline) {
  pollfd entry{fd, POLLIN, 0};
  // wait: own work on the device; deadline, of the drain; nothing
  ::poll(&entry, 1, deadline.poll_timeout_ms());
}

}  // namespace

ArenaUse::~ArenaUse() {
  if (owner_ != nullptr) owner_->leave();
}

WorkerArena::WorkerArena(ipc::Device& device, ipc::Rank rank)
    : device_(device), rank_(rank), stream_(make_stream(device, ipc::StreamPriority::kNormal)) {}

void WorkerArena::add_revoke_listener(std::function<void()> listener) {
  listeners_.push_back(std::move(listener));
}

// The caller holds the mutex.
Status WorkerArena::check_open() const {
  if (mapped_ && open_) return ipc::ok();
  return KVFERRY_ERROR(kNotReady, "the arena of rank {} is {}; wait for Ready", rank_.value,
                       mapped_ ? "being cleared" : "not mapped");
}

Result<ArenaUse> WorkerArena::enter() {
  const std::lock_guard lock(mutex_);
  KVFERRY_TRY(check_open());
  ++users_;
  return ArenaUse(this, &*mapped_);
}

Result<ArenaUse> WorkerArena::enter(const ipc::SessionId& session, Epoch epoch) {
  const std::lock_guard lock(mutex_);
  KVFERRY_TRY(check_open());
  if (mapped_->session != session || mapped_->epoch != epoch) {
    return KVFERRY_ERROR(
        kStaleEpoch, "rank {}: request names session {} epoch {}, mapped is {} epoch {}",
        rank_.value, session.hex(), epoch.value, mapped_->session.hex(), mapped_->epoch.value);
  }
  ++users_;
  return ArenaUse(this, &*mapped_);
}

void WorkerArena::leave() noexcept {
  const std::lock_guard lock(mutex_);
  if (--users_ == 0) idle_.signal();
}

Result<MappedArena> WorkerArena::build(ipc::SessionId session, const ipc::Arena& arena) {
  MappedArena mapped;
  mapped.session = session;
  mapped.epoch = arena.epoch();
  const ipc::ArenaLayout& layout = arena.layout();
  for (std::uint32_t g = 0; g < layout.groups.size(); ++g) {
    GroupView& group = mapped.groups.emplace_back();
    group.block_count = layout.groups[g].block_count;
    for (const RegionSet set : kSets) {
      auto regions = arena.strided(ipc::GroupId{g}, set, rank_);
      if (regions.empty()) continue;
      group.packed_bytes[GroupView::index(set)] = arena.packed_bytes(ipc::GroupId{g}, set);
      group.layers[GroupView::index(set)] = arena.layers(ipc::GroupId{g}, set);
      KVFERRY_ASSIGN(group.tables[GroupView::index(set)],
                     device_.make_region_table(std::move(regions)));
    }
  }
  mapped.slot_bytes = layout.staging.slot_bytes;
  for (std::uint32_t slot = 0; slot < layout.staging.slots; ++slot) {
    mapped.slots.push_back(arena.staging_slot(slot));
  }
  return mapped;
}

Status WorkerArena::zero(const ipc::Arena& arena) {
  const ipc::TimePoint started = ipc::MonotonicClock::now();
  zeroing_ = true;
  // Nothing beside them: memory that an engine lent may hold its other tensors as well.
  for (const ipc::ByteRange& range : arena.layout().covered_ranges()) {
    KVFERRY_TRY(stream_->zero(arena.segment(range.segment) + range.offset, range.size_bytes));
  }
  zeroed_.drain();
  KVFERRY_TRY(stream_->notify(zeroed_.fd()));
  // 1 GiB/s is far below what any device does, and a simulated one shares its CPU.
  KVFERRY_TRY(
      await_zeroed(arena.epoch(), Deadline::after(10s + arena.total_bytes() / (1ULL << 30) * 1s)));
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(ipc::MonotonicClock::now() - started);
  ipc::log_info("arena: epoch={} zeroed {} in {} ms", arena.epoch().value,
                ipc::format_size(arena.total_bytes()), took.count());
  return ipc::ok();
}

// Also after a zeroing that failed: what of it runs on would write into whatever is there next.
Status WorkerArena::await_zeroed(Epoch epoch, Deadline deadline) {
  if (!zeroing_) return ipc::ok();
  KVFERRY_TRY(
      await_stream(*stream_, zeroed_, deadline, fmt::format("zeroing of epoch {}", epoch.value)));
  zeroing_ = false;
  return ipc::ok();
}

Status WorkerArena::on_mapped(ipc::SessionId session,
                              ipc::Arena& arena,
                              ipc::ArenaContents contents) {
  KVFERRY_ASSIGN(MappedArena mapped, build(session, arena));
  if (contents == ipc::ArenaContents::kPrepared) {
    ipc::log_info("arena: epoch={} was zeroed by an earlier life, its blocks are kept",
                  arena.epoch().value);
  } else {
    KVFERRY_TRY(zero(arena));
  }
  const std::lock_guard lock(mutex_);
  KVFERRY_CHECK(!mapped_.has_value(),
                "a second arena was mapped before the first one was unmapped");
  mapped_.emplace(std::move(mapped));
  open_ = true;
  return ipc::ok();
}

Status WorkerArena::quiesce(Epoch epoch, Deadline deadline) {
  const ipc::TimePoint started = ipc::MonotonicClock::now();
  KVFERRY_TRY(await_zeroed(epoch, deadline));
  std::uint32_t at_start = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!mapped_ || mapped_->epoch != epoch) return ipc::ok();
    open_ = false;
    at_start = users_;
  }
  for (const auto& listener : listeners_) listener();
  if (at_start > 0 && !deadline.expired()) {
    ipc::log_info("quiesce: epoch={} waits for {} launches of this worker, deadline in {} ms",
                  epoch.value, at_start, deadline.poll_timeout_ms());
  }
  while (true) {
    idle_.drain();
    std::uint32_t left = 0;
    {
      const std::lock_guard lock(mutex_);
      left = users_;
    }
    if (left == 0) break;
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout,
                           "epoch {}: {} launches of this worker still use the arena; "
                           "the device may hang, nothing was freed",
                           epoch.value, left);
    }
    wait_readable(idle_.fd(), deadline);
  }
  if (at_start > 0) {
    ipc::log_info(
        "quiesce: epoch={} idle after {} us", epoch.value,
        std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() - started)
            .count());
  }
  return ipc::ok();
}

void WorkerArena::on_unmapped(Epoch epoch) {
  std::optional<MappedArena> dropped;  // Freed after the lock: tables may synchronise the device.
  const std::lock_guard lock(mutex_);
  KVFERRY_CHECK(users_ == 0, "arena unmapped while launches of this worker use it");
  if (mapped_ && mapped_->epoch != epoch) {
    ipc::log_error("arena: unmapped epoch={} but epoch={} was mapped", epoch.value,
                   mapped_->epoch.value);
  }
  open_ = false;
  dropped.swap(mapped_);
}

}  // namespace kvferry::worker
