// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bare_copies.hpp"

#include "must.hpp"

#include <poll.h>

#include <algorithm>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// All that is enqueued at a time takes less than a second on any link.
constexpr ipc::Duration kEnds = 60s;
/// A device that failed never signals: it is looked at.
constexpr ipc::Duration kLook = 100ms;

ipc::CopyDirection direction_of(std::size_t lane) {
  return lane == kToHostLane ? ipc::CopyDirection::kDeviceToHost
                             : ipc::CopyDirection::kHostToDevice;
}

double gbps(std::uint64_t size_bytes, double seconds) {
  return static_cast<double>(size_bytes) / seconds / 1e9;
}

}  // namespace

std::string_view to_string(BareStrategy strategy) noexcept {
  switch (strategy) {
    case BareStrategy::kMemcpy: return "memcpy";
    case BareStrategy::kBatch: return "batch";
    case BareStrategy::kStrided: return "strided";
    case BareStrategy::kKernel: return "kernel";
  }
  return "invalid";
}

BareCopies::BareCopies(ipc::Device& device,
                       const BenchShape& shape,
                       const ipc::ArenaLayout& layout,
                       std::uint32_t host_blocks)
    : limit_bytes_(device.spec().kind == ipc::DeviceKind::kCuda ? kCudaLimitBytes
                                                                : kHostLimitBytes),
      arena_(device, layout, ipc::HandleKind::kVmm) {
  for (Lane& lane : lanes_) {
    lane.stream = must(device.make_stream(ipc::StreamPriority::kNormal));
    lane.host =
        must(device.make_pinned_buffer(std::max(limit_bytes_, host_blocks * shape.rank_bytes())));
    lane.flat = must(device.allocate(limit_bytes_, ipc::HandleKind::kVmm, nullptr));
  }
}

ipc::Result<double> BareCopies::time(Way way, const std::function<ipc::Status()>& fill) {
  const ipc::Deadline deadline = ipc::Deadline::after(kEnds);
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  KVFERRY_TRY(fill());
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (!has_lane(way, lane)) continue;
    KVFERRY_TRY(lanes_.at(lane).stream->notify(lanes_.at(lane).ended.fd()));
  }
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (has_lane(way, lane)) KVFERRY_TRY(wait(lanes_.at(lane), deadline));
  }
  return std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
}

// A GPU's stream ends a moment behind its signal: that moment is spun away, a sleep would count.
ipc::Status BareCopies::wait(Lane& lane, ipc::Deadline deadline) {
  bool signalled = false;
  while (true) {
    KVFERRY_ASSIGN(const bool ended, lane.stream->query());
    if (ended && (signalled || lane.ended.drain())) return ipc::ok();
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "copies did not end; the device may hang");
    }
    if (signalled) continue;
    pollfd entry{lane.ended.fd(), POLLIN, 0};
    // wait: own copies; deadline, kEnds, in steps of kLook; the device's failure
    ::poll(&entry, 1, ipc::Deadline::after(kLook).earlier(deadline).poll_timeout_ms());
    signalled = lane.ended.drain();
  }
}

ipc::Status BareCopies::enqueue_large(Way way, std::uint64_t size_bytes) {
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (!has_lane(way, lane)) continue;
    Lane& used = lanes_.at(lane);
    const ipc::CopyOp op{used.host->data(), used.flat->address(), size_bytes};
    KVFERRY_TRY(used.stream->copy(direction_of(lane), {&op, 1}, ipc::CopyMode::kEach));
  }
  return ipc::ok();
}

ipc::Result<double> BareCopies::limit(Way way) {
  KVFERRY_ASSIGN(const double seconds, time(way, [this, way]() -> ipc::Status {
                   for (std::uint64_t i = 0; i < kLimitCopies; ++i) {
                     KVFERRY_TRY(enqueue_large(way, limit_bytes_));
                   }
                   return ipc::ok();
                 }));
  return gbps((way == Way::kBoth ? 2 : 1) * limit_bytes(), seconds);
}

ipc::Result<double> BareCopies::one_copy(Way way, std::uint64_t size_bytes) {
  KVFERRY_ASSIGN(const double seconds,
                 time(way, [this, way, size_bytes] { return enqueue_large(way, size_bytes); }));
  return seconds * 1e6;
}

ipc::Status BareCopies::enqueue(BareStrategy strategy,
                                std::size_t lane,
                                const std::vector<worker::SequenceItem>& blocks) {
  Lane& used = lanes_.at(lane);
  used.ops.clear();
  used.rows.clear();
  std::byte* host = used.host->data();
  for (std::size_t next = 0; next < blocks.size();) {
    const ipc::GroupId id = blocks[next].group;
    const std::uint64_t packed_bytes = arena_.packed_bytes(id);
    used.ids.clear();
    for (; next < blocks.size() && blocks[next].group == id; ++next) {
      used.ids.push_back(blocks[next].block.value);
    }
    if (strategy == BareStrategy::kKernel) {
      const ipc::DevicePtr mapped{reinterpret_cast<std::uintptr_t>(host)};
      KVFERRY_TRY(lane == kToHostLane
                      ? used.stream->gather(arena_.table(id), used.ids, mapped, packed_bytes)
                      : used.stream->scatter(arena_.table(id), used.ids, mapped, packed_bytes));
      host += used.ids.size() * packed_bytes;
      continue;
    }
    for (const std::uint32_t block : used.ids) {
      if (strategy == BareStrategy::kStrided) {
        arena_.add_rows(id, block, host, used.rows);
      } else {
        arena_.add_slices(id, block, host, used.ops);
      }
      host += packed_bytes;
    }
  }
  if (strategy == BareStrategy::kStrided) {
    return used.stream->copy_rows(direction_of(lane), used.rows);
  }
  if (used.ops.empty()) return ipc::ok();
  return used.stream->copy(
      direction_of(lane), used.ops,
      strategy == BareStrategy::kBatch ? ipc::CopyMode::kBatch : ipc::CopyMode::kEach);
}

ipc::Result<double> BareCopies::move(BareStrategy strategy,
                                     Way way,
                                     const Jobs& jobs,
                                     std::uint64_t bytes_each_way) {
  std::array<std::uint64_t, 2> enqueued{};
  KVFERRY_ASSIGN(const double seconds, time(way, [&]() -> ipc::Status {
                   for (std::size_t i = 0; std::max(enqueued[0], enqueued[1]) < bytes_each_way;
                        ++i) {
                     // In turns, so that both ways run from the start.
                     for (std::size_t lane = 0; lane < jobs.size(); ++lane) {
                       if (!has_lane(way, lane)) continue;
                       const auto& job = jobs.at(lane).at(i % jobs.at(lane).size());
                       KVFERRY_TRY(enqueue(strategy, lane, job));
                       enqueued.at(lane) += bytes_of(job);
                     }
                   }
                   return ipc::ok();
                 }));
  return gbps(enqueued[0] + enqueued[1], seconds);
}

std::uint64_t BareCopies::bytes_of(const std::vector<worker::SequenceItem>& blocks) const {
  std::uint64_t bytes = 0;
  for (const worker::SequenceItem& item : blocks) {
    bytes += arena_.packed_bytes(item.group);
  }
  return bytes;
}

ipc::Result<double> BareCopies::one_job(BareStrategy strategy,
                                        Way way,
                                        const std::vector<worker::SequenceItem>& blocks) {
  KVFERRY_ASSIGN(const double seconds, time(way, [&]() -> ipc::Status {
                   for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
                     if (has_lane(way, lane)) KVFERRY_TRY(enqueue(strategy, lane, blocks));
                   }
                   return ipc::ok();
                 }));
  return seconds * 1e6;
}

}  // namespace kvferry::cli
