// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/measure_bed.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr std::uint32_t kMostJobBlocks = 64;
constexpr std::uint64_t kPageBytes = 4096;
/// Of the device's free memory, what a measurement may take: others allocate meanwhile.
constexpr std::uint64_t kPartOfFree = 8;
/// A timed step takes milliseconds: a device that needs so long hangs.
constexpr ipc::Duration kStepEnds = 2s;
/// A device that failed never signals: it is looked at.
constexpr ipc::Duration kStepLook = 100ms;
/// Of the order in which blocks lie in the arena: the same every time.
constexpr std::uint64_t kBlockSeed = 1;

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

/// Where the segments lie in one allocation: engines have one for each region, but hundreds of them
/// would take hundreds of times the device's granularity.
std::uint64_t flat_bytes(const ipc::ArenaLayout& layout) {
  std::uint64_t bytes = 0;
  for (const std::uint64_t segment : layout.segment_bytes) {
    bytes += align_up(segment, ipc::kArenaAlignment);
  }
  return bytes;
}

/// As many blocks as fit, and no more than a job has.
Result<std::pair<ipc::ArenaLayout, std::uint32_t>> plan_small(ipc::Geometry geometry,
                                                              ipc::ArenaOrder order,
                                                              std::uint64_t most_bytes) {
  for (ipc::GroupSpec& group : geometry.groups) group.blocks_percent = 100;
  ipc::ArenaOptions options;
  options.order = order;
  for (options.gpu_blocks = kMostJobBlocks; options.gpu_blocks > 0; options.gpu_blocks /= 2) {
    KVFERRY_ASSIGN(ipc::ArenaLayout layout, ipc::plan_arena(geometry, options));
    if (flat_bytes(layout) <= most_bytes) return std::pair(std::move(layout), options.gpu_blocks);
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "one block of each group of geometry '{}' does not fit into the {} that "
                       "copies may be measured with",
                       geometry.name, ipc::format_size(most_bytes));
}

}  // namespace

Result<std::unique_ptr<MeasureBed>> MeasureBed::make(ipc::Device& device,
                                                     const ipc::Geometry& geometry,
                                                     ipc::ArenaOrder order) {
  KVFERRY_ASSIGN(const ipc::MemoryInfo memory, device.memory_info());
  const std::uint64_t most = std::min(kMostBytes, memory.free_bytes / kPartOfFree);
  KVFERRY_ASSIGN(const auto planned, plan_small(geometry, order, most));
  std::unique_ptr<MeasureBed> bed(new MeasureBed(device, planned.first, planned.second));
  KVFERRY_TRY(bed->set_up_host());
  return bed;
}

MeasureBed::MeasureBed(ipc::Device& device, ipc::ArenaLayout layout, std::uint32_t blocks)
    : device_(device),
      layout_(std::move(layout)),
      parts_(layout_),
      blocks_(blocks),
      results_(blocks, 0) {}

Status MeasureBed::take_device() {
  // VMM: giving it back waits for nobody's work.
  KVFERRY_ASSIGN(memory_, device_.allocate(flat_bytes(layout_), ipc::HandleKind::kVmm, nullptr));
  std::uint64_t next = 0;
  for (const std::uint64_t segment : layout_.segment_bytes) {
    segments_.push_back(memory_->address() + next);
    next += align_up(segment, ipc::kArenaAlignment);
  }
  KVFERRY_ASSIGN(stream_, device_.make_stream(ipc::StreamPriority::kNormal));
  return ipc::ok();
}

void MeasureBed::give_device_back() {
  stream_.reset();  // waits, with a limit
  segments_.clear();
  memory_.reset();
}

Status MeasureBed::set_up_host() {
  std::uint64_t host_bytes = 0;
  std::mt19937_64 random(kBlockSeed);
  for (std::uint32_t g = 0; g < layout_.groups.size(); ++g) {
    const ipc::GroupId group{g};
    // As the pool has them: all replicated parts together, then all shards.
    const std::uint64_t replicated = parts_.replicated_bytes(group);
    const std::uint64_t shards = blocks_ * replicated;
    std::vector<std::uint32_t> ids(blocks_);
    std::iota(ids.begin(), ids.end(), 0U);
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<ipc::MoverItem>& items = items_.emplace_back();
    for (std::uint32_t i = 0; i < blocks_; ++i) {
      items.push_back({group, ipc::BlockId{ids[i]}, i * replicated,
                       shards + i * parts_.sharded_bytes(group), true});
    }
    host_bytes = std::max(host_bytes, blocks_ * block_bytes(group));
  }
  // Touched here, then registered: that holds the driver for 2 ms, an allocation by it for 25.
  host_memory_.resize(host_bytes + 2 * kPageBytes);
  const auto address = reinterpret_cast<std::uintptr_t>(host_memory_.data());
  std::byte* page = host_memory_.data() + (align_up(address, kPageBytes) - address);
  KVFERRY_TRY(device_.register_host(page, align_up(host_bytes, kPageBytes)));
  host_ = page;
  return ipc::ok();
}

MeasureBed::~MeasureBed() {
  give_device_back();
  if (host_ == nullptr) return;
  if (const Status status = device_.unregister_host(host_); !status) {
    ipc::log_warn("memory of a measurement not unregistered: {}", status.error().to_string());
  }
}

Result<double> MeasureBed::time(const std::function<Status()>& enqueue) {
  const ipc::Deadline deadline = ipc::Deadline::after(kStepEnds);
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  KVFERRY_TRY(enqueue());
  KVFERRY_TRY(stream_->notify(ended_.fd()));
  bool signalled = false;
  while (true) {
    // A GPU's stream ends a moment behind its signal: that moment is spun away, a sleep would
    // count.
    KVFERRY_ASSIGN(const bool ended, stream_->query());
    if (ended && (signalled || ended_.drain())) break;
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout,
                           "copies of a measurement did not end within {} s; the device "
                           "may hang",
                           std::chrono::duration_cast<std::chrono::seconds>(kStepEnds).count());
    }
    if (signalled) continue;
    pollfd entry{ended_.fd(), POLLIN, 0};
    // wait: copies of a measurement; deadline, kStepEnds, in steps of kStepLook; the device's
    // failure
    ::poll(&entry, 1, ipc::Deadline::after(kStepLook).earlier(deadline).poll_timeout_ms());
    signalled = ended_.drain();
  }
  return std::chrono::duration<double>(ipc::MonotonicClock::now() - start).count();
}

Status MeasureBed::enqueue_job(CopyStrategy strategy,
                               ipc::CopyDirection direction,
                               ipc::GroupId group,
                               std::uint32_t count) {
  PlanLimits limits;
  limits.pool_piece_bytes = 2 * kMostBytes;  // one piece
  limits.strided = strategy == CopyStrategy::kStrided;
  // What a ring's slot holds, as far as it is known here: chunks of the same size.
  limits.slot_bytes =
      strategy == CopyStrategy::kStaged ? std::max(limits.chunk_bytes, block_bytes(group)) : 0;
  planner_.start(parts_, std::span(items_.at(group.value)).first(count),
                 std::span(results_).first(count), limits);
  while (planner_.has_next()) {
    planner_.plan_next(chunk_);
    KVFERRY_TRY(enqueue_chunk(strategy, direction));
  }
  return ipc::ok();
}

Status MeasureBed::enqueue_chunk(CopyStrategy strategy, ipc::CopyDirection direction) {
  ops_.clear();
  row_ops_.clear();
  for (const CopyRun& run : chunk_.runs) {
    // A slot is any memory of the device: its copies do not care what lies there.
    const ipc::DevicePtr base =
        strategy == CopyStrategy::kStaged ? memory_->address() : segments_.at(run.segment);
    ops_.push_back({host_ + run.pool_offset, base + run.device_offset, run.size_bytes});
  }
  for (const CopyRows& rows : chunk_.rows) {
    row_ops_.push_back({host_ + rows.pool_offset, rows.pool_pitch,
                        segments_.at(rows.segment) + rows.device_offset, rows.device_pitch,
                        rows.row_bytes, rows.rows});
  }
  if (!row_ops_.empty()) KVFERRY_TRY(stream_->copy_rows(direction, row_ops_));
  if (ops_.empty()) return ipc::ok();
  return stream_->copy(
      direction, ops_,
      strategy == CopyStrategy::kMemcpy ? ipc::CopyMode::kEach : ipc::CopyMode::kBatch);
}

Status MeasureBed::enqueue_large(ipc::CopyDirection direction, std::uint64_t size_bytes) {
  const ipc::CopyOp op{host_, memory_->address(), size_bytes};
  return stream_->copy(direction, {&op, 1}, ipc::CopyMode::kEach);
}

}  // namespace kvferry::cache_manager
