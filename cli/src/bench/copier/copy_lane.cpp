// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/copy_lane.hpp"

#include "bench/copier/piece_copies.hpp"
#include "kvferry/ipc/base/look.hpp"
#include "must.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// As a mover's: what is enqueued at a time, and so long it looks at what is small and alone before
/// it has the device tell.
constexpr std::uint64_t kMostLaneBytes = 32ULL << 20;
constexpr std::uint64_t kDirectChunkBytes = 8ULL << 20;
constexpr std::size_t kMostLaneCalls = 512;
constexpr std::uint64_t kWatchedChunkBytes = 4ULL << 20;
constexpr ipc::Duration kWatchTime = std::chrono::microseconds(150);
/// Of a track of its own each; more slots than that hide nothing more.
constexpr std::size_t kMostTracks = 4;
/// The next chunk of a slot waits in its stream.
constexpr std::size_t kChunksOfATrack = 2;
/// A device that failed signals nobody: it is looked at.
constexpr ipc::Duration kLookPeriod = 100ms;
constexpr ipc::Duration kLaneHang = 30s;

std::uint64_t take_signals(int event_fd) noexcept {
  std::uint64_t count = 0;
  // wait-none: an eventfd of ours, O_NONBLOCK
  return ::read(event_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

}  // namespace

CopyLane::CopyLane(Context context) : context_(std::move(context)) {
  const std::size_t tracks = stages() ? std::min(context_.slots.size(), kMostTracks) : 1;
  if (tracks == 0) {
    throw ipc::Exception(
        KVFERRY_ERROR(kInvalidArgument,
                      "staged copies take a staging ring with two slots, and the arena has "
                      "none; give more --staging-slots"));
  }
  for (std::size_t i = 0; i < tracks; ++i) {
    Track& track = *tracks_.emplace_back(std::make_unique<Track>());
    if (stages()) track.slot = context_.slots[i];
    track.stream = must(context_.device.make_stream(ipc::StreamPriority::kHigh));
    context_.loop.watch(track.ended.fd(), [this, &track] { on_signalled(track); });
  }
}

CopyLane::~CopyLane() {
  context_.loop.cancel(watchdog_);
  for (const auto& track : tracks_) context_.loop.unwatch(track->ended.fd());
}

void CopyLane::submit(CopyRequest request) {
  jobs_.push_back(std::make_unique<Job>());
  jobs_.back()->request = std::move(request);
}

CopyLane::Job* CopyLane::next_job() noexcept {
  const auto found =
      std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->has_next(); });
  return found == jobs_.end() ? nullptr : found->get();
}

bool CopyLane::has_room(const Track& track) const noexcept {
  if (chunks_ == 0) return true;
  if (stages()) return track.under_way.size() < kChunksOfATrack;
  return bytes_ < kMostLaneBytes && calls_ < kMostLaneCalls;
}

void CopyLane::pump() {
  for (bool watched = true; watched;) {
    for (Job* job = next_job(); job != nullptr; job = next_job()) {
      Track& track = *tracks_[turn_ % tracks_.size()];
      if (!has_room(track)) break;
      ++turn_;
      start_chunk(*job, track);
    }
    // What is small and alone is looked at; then there may be room for more.
    watched = false;
    if (chunks_ == 1 && bytes_ <= kWatchedChunkBytes) {
      for (const auto& track : tracks_) {
        if (track->unnoticed == 1) watched = watch(*track);
      }
    }
  }
  ask_for_notices();
  answer_ended();
}

void CopyLane::start_chunk(Job& job, Track& track) {
  Chunk chunk{&job, 0, 0};
  const ipc::Status enqueued =
      stages() ? enqueue_staged(job, track, chunk) : enqueue_direct(job, track, chunk);
  // What went out of it all the same has to be awaited like any other.
  if (!enqueued) job.error = enqueued.error();
  if (chunks_ == 0) progress_ = ipc::MonotonicClock::now();
  ++job.chunks;
  ++chunks_;
  calls_ += chunk.calls;
  bytes_ += chunk.size_bytes;
  ++track.unnoticed;
  track.under_way.push_back(chunk);
}

ipc::Status CopyLane::enqueue_staged(Job& job, Track& track, Chunk& chunk) {
  const std::vector<CopyItem>& items = job.request.items;
  const ipc::GroupId group = items[job.next].group;
  const std::uint64_t packed = context_.arena.packed_bytes(group);
  ops_.clear();
  ids_.clear();
  for (; job.next < items.size() && items[job.next].group == group &&
         chunk.size_bytes + packed <= context_.slot_bytes;
       ++job.next) {
    const std::uint64_t offset = items[job.next].pool_offset;
    KVFERRY_ASSIGN(std::byte * host, context_.pool.pinned(offset, packed));
    append_copy(ops_, {host, track.slot + chunk.size_bytes, packed}, offset);
    ids_.push_back(items[job.next].block.value);
    chunk.size_bytes += packed;
  }
  chunk.calls = 2;
  const ipc::RegionTable& table = context_.arena.table(group);
  if (to_host()) KVFERRY_TRY(track.stream->gather(table, ids_, track.slot, packed));
  KVFERRY_TRY(track.stream->copy(context_.direction, ops_, ipc::CopyMode::kBatch));
  if (!to_host()) KVFERRY_TRY(track.stream->scatter(table, ids_, track.slot, packed));
  return ipc::ok();
}

ipc::Status CopyLane::enqueue_direct(Job& job, Track& track, Chunk& chunk) {
  const std::vector<CopyItem>& items = job.request.items;
  const bool strided = context_.strategy == OwnStrategy::kStrided;
  ops_.clear();
  rows_.clear();
  for (; job.next < items.size() && chunk.size_bytes < kDirectChunkBytes &&
         ops_.size() + rows_.size() < kMostLaneCalls;
       ++job.next) {
    const CopyItem& item = items[job.next];
    const std::uint64_t packed = context_.arena.packed_bytes(item.group);
    KVFERRY_ASSIGN(std::byte * host, context_.pool.pinned(item.pool_offset, packed));
    const auto offset_of = [&](const void* part) {
      return item.pool_offset +
             static_cast<std::uint64_t>(static_cast<const std::byte*>(part) - host);
    };
    block_ops_.clear();
    block_rows_.clear();
    if (strided) {
      context_.arena.add_rows(item.group, item.block.value, host, block_rows_);
    } else {
      context_.arena.add_slices(item.group, item.block.value, host, block_ops_);
    }
    for (const auto& rows : block_rows_) append_rows(rows_, ops_, rows, offset_of(rows.host));
    for (const auto& op : block_ops_) append_copy(ops_, op, offset_of(op.host));
    chunk.size_bytes += packed;
  }
  const bool each = context_.strategy == OwnStrategy::kMemcpy;
  chunk.calls = rows_.size() + (each ? ops_.size() : std::min<std::size_t>(1, ops_.size()));
  if (!rows_.empty()) KVFERRY_TRY(track.stream->copy_rows(context_.direction, rows_));
  if (ops_.empty()) return ipc::ok();
  return track.stream->copy(context_.direction, ops_,
                            each ? ipc::CopyMode::kEach : ipc::CopyMode::kBatch);
}

// True when the only chunk has ended.
bool CopyLane::watch(Track& track) {
  ipc::Result<bool> ended = false;
  (void)ipc::look_for(kWatchTime, [&] {
    ended = track.stream->query();
    return !ended || *ended || context_.has_news();
  });
  if (!ended) {
    context_.on_device_failed(ended.error());
    return false;
  }
  if (!*ended) return false;
  track.unnoticed = 0;
  finish(track, 1);
  answer_ended();
  return true;
}

// One for all chunks that a track was given since the last one: it costs some 35 us, and as much of
// a processor.
void CopyLane::ask_for_notices() {
  for (const auto& track : tracks_) {
    if (track->unnoticed == 0) continue;
    if (const auto notified = track->stream->notify(track->ended.fd()); !notified) {
      context_.on_device_failed(notified.error());
      return;
    }
    track->notices.push_back(std::exchange(track->unnoticed, 0));
  }
  if (chunks_ > 0) arm_watchdog();
}

void CopyLane::on_signalled(Track& track) {
  const std::uint64_t signalled = take_signals(track.ended.fd());
  if (const auto state = track.stream->query(); !state) {
    context_.on_device_failed(state.error());
    return;
  }
  std::size_t chunks = 0;
  for (std::uint64_t i = 0; i < signalled && !track.notices.empty(); ++i) {
    chunks += track.notices.front();
    track.notices.pop_front();
  }
  finish(track, chunks);
  answer_ended();
  pump();
}

void CopyLane::finish(Track& track, std::size_t chunks) {
  progress_ = ipc::MonotonicClock::now();
  for (; chunks > 0 && !track.under_way.empty(); --chunks) {
    const Chunk chunk = track.under_way.front();
    track.under_way.pop_front();
    --chunk.job->chunks;
    --chunks_;
    calls_ -= chunk.calls;
    bytes_ -= chunk.size_bytes;
  }
}

void CopyLane::answer_ended() {
  for (auto job = jobs_.begin(); job != jobs_.end();) {
    if ((*job)->chunks > 0 || (*job)->has_next()) {
      ++job;
      continue;
    }
    const std::unique_ptr<Job> ended = std::move(*job);
    job = jobs_.erase(job);
    context_.answer({ended->request.id, ended->error});
  }
}

void CopyLane::arm_watchdog() {
  if (std::exchange(watchdog_armed_, true)) return;
  watchdog_ = context_.loop.after(kLookPeriod, [this] { on_watchdog(); });
}

void CopyLane::on_watchdog() {
  watchdog_armed_ = false;
  if (chunks_ == 0) return;
  for (const auto& track : tracks_) {
    if (const auto state = track->stream->query(); !state) {
      context_.on_device_failed(state.error());
      return;
    }
  }
  if (ipc::MonotonicClock::now() - progress_ > kLaneHang) {
    context_.on_device_failed(KVFERRY_ERROR(kTimeout,
                                            "{} chunks of copies do not end; the device "
                                            "may hang",
                                            chunks_));
    return;
  }
  arm_watchdog();
}

}  // namespace kvferry::cli
