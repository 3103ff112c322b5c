// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_stream.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kQueueLimit = 1024;
constexpr std::chrono::seconds kRoomPatience{30};
constexpr std::chrono::seconds kDrainPatience{10};

bool valid_range(std::uintptr_t address, std::uint64_t size_bytes) {
  std::uint64_t end = 0;
  return address != 0 && checked_add(address, size_bytes, end);
}

/// Calls launch(part, first index) for pieces of at most the launch's size.
template <typename T, typename Launch>
void in_launches(const std::vector<T>& items, std::size_t limit, Launch launch) {
  for (std::size_t first = 0; first < items.size(); first += limit) {
    launch(std::span(items).subspan(first, std::min(limit, items.size() - first)), first);
  }
}

kernels::BlockIds to_block_ids(std::span<const std::uint32_t> ids) {
  kernels::BlockIds out;
  out.count = static_cast<std::uint32_t>(ids.size());
  std::copy(ids.begin(), ids.end(), std::begin(out.ids));
  return out;
}

std::uint64_t packed_extent(std::span<const kernels::StridedRegion> regions) {
  std::uint64_t extent = 0;
  for (const kernels::StridedRegion& region : regions) {
    extent = std::max(extent, region.packed_offset + region.block_bytes);
  }
  return extent;
}

}  // namespace

void HostStream::CopyWork::run() const {
  for (const CopyOp& op : ops) {
    const bool to_host = direction == CopyDirection::kDeviceToHost;
    std::memcpy(to_host ? op.host : op.device.raw(), to_host ? op.device.raw() : op.host,
                op.size_bytes);
  }
}

void HostStream::ZeroWork::run() const { std::memset(target.raw(), 0, size_bytes); }

void HostStream::PackWork::run() const {
  in_launches(ids, kernels::kMaxBlocksPerLaunch, [&](auto part, std::size_t first) {
    const kernels::PackedBlocks layout{
        regions.data(), static_cast<std::uint32_t>(regions.size()),
        static_cast<unsigned char*>((packed + first * packed_stride).raw()), packed_stride};
    if (gathers) {
      kernels::host::gather(layout, to_block_ids(part));
    } else {
      kernels::host::scatter(layout, to_block_ids(part));
    }
  });
}

void HostStream::PatternWork::run() const {
  in_launches(blocks, kernels::kMaxSeededPerLaunch, [&](auto part, std::size_t first) {
    kernels::SeededBlocks launch;
    launch.count = static_cast<std::uint32_t>(part.size());
    std::copy(part.begin(), part.end(), std::begin(launch.blocks));
    const auto count = static_cast<std::uint32_t>(regions.size());
    if (mismatches == nullptr) {
      kernels::host::fill_pattern(regions.data(), count, launch);
    } else {
      kernels::host::verify_pattern(regions.data(), count, launch, mismatches + first);
    }
  });
}

void HostStream::ChecksumWork::run() const {
  in_launches(ids, kernels::kMaxBlocksPerLaunch, [&](auto part, std::size_t first) {
    kernels::host::checksum(regions.data(), static_cast<std::uint32_t>(regions.size()),
                            to_block_ids(part), results + first);
  });
}

void HostStream::NotifyWork::run() const {
  const std::uint64_t one = 1;
  ssize_t count = 0;
  do {
    // wait-none: an eventfd of ours, O_NONBLOCK
    count = ::write(event_fd.get(), &one, sizeof(one));
  } while (count < 0 && errno == EINTR);
  if (count < 0) log_error("host stream: notify: {}", KVFERRY_ERRNO("write eventfd").message);
}

HostStream::HostStream(std::string device_name) : device_name_(std::move(device_name)) {
  thread_.emplace("kvf-stream", OwnThread::Runs::kOurCode, [this] { run(); });
}

HostStream::~HostStream() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // wait: work of a stream that ends; kDrainPatience; nothing
    const bool drained = has_room_.wait_until(lock, Deadline::after(kDrainPatience).when(),
                                              [&] { return queue_.empty() && !running_; });
    if (!drained) {
      log_error("{}: a stream ends with {} items of work dropped after {} s", device_name_,
                queue_.size(), kDrainPatience.count());
      queue_.clear();
    }
    stopping_ = true;
  }
  has_work_.notify_all();
  // wait: the stream's own thread; wait_end() gives it kEndsWithin; it runs one copy at most
  thread_->wait_end();
}

void HostStream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    // wait-idle: work; enqueue() or the end of the stream; thread kvf-stream
    has_work_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      const Work work = std::move(queue_.front());
      queue_.pop_front();
      running_ = true;
      if (const auto* notification = std::get_if<NotifyWork>(&work)) {
        // One step under the lock: whom it wakes finds the stream idle, and who finds the stream
        // idle finds every eventfd written. Between the two an owner of the eventfd could use it
        // for new work, which the late write would then end.
        notification->run();
        running_ = false;
        has_room_.notify_all();
        continue;
      }
      lock.unlock();
      has_room_.notify_all();
      std::visit([](const auto& item) { item.run(); }, work);
    }
    lock.lock();
    running_ = false;
    has_room_.notify_all();
  }
}

Status HostStream::enqueue(Work work) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // wait: room in the queue of the stream; kRoomPatience; nothing
    if (!has_room_.wait_until(lock, Deadline::after(kRoomPatience).when(),
                              [&] { return queue_.size() < kQueueLimit; })) {
      return KVFERRY_ERROR(kBusy, "{}: a stream holds {} items of work and none ended in {} s",
                           device_name_, queue_.size(), kRoomPatience.count());
    }
    queue_.push_back(std::move(work));
  }
  has_work_.notify_one();
  return ok();
}

Status HostStream::copy(CopyDirection direction, std::span<const CopyOp> ops, CopyMode /*mode*/) {
  if (direction != CopyDirection::kDeviceToHost && direction != CopyDirection::kHostToDevice) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: copy direction {} does not exist", device_name_,
                         static_cast<unsigned>(direction));
  }
  for (std::size_t i = 0; i < ops.size(); ++i) {
    const CopyOp& op = ops[i];
    if (!valid_range(op.device.address, op.size_bytes) ||
        !valid_range(reinterpret_cast<std::uintptr_t>(op.host), op.size_bytes)) {
      return KVFERRY_ERROR(kInvalidArgument, "{}: copy {} of {}: {} bytes, host {}, device {:#x}",
                           device_name_, i, ops.size(), op.size_bytes, fmt::ptr(op.host),
                           op.device.address);
    }
  }
  if (ops.empty()) return ok();
  return enqueue(CopyWork{direction, {ops.begin(), ops.end()}});
}

Status HostStream::zero(DevicePtr target, std::uint64_t size_bytes) {
  if (!valid_range(target.address, size_bytes)) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: zero {} bytes at {:#x}", device_name_, size_bytes,
                         target.address);
  }
  return enqueue(ZeroWork{target, size_bytes});
}

Status HostStream::enqueue_pack(bool gathers,
                                const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                DevicePtr packed,
                                std::uint64_t packed_stride) {
  if (ids.empty()) return ok();
  std::uint64_t total = 0;
  if (packed_stride < packed_extent(table.regions()) ||
      !checked_mul(packed_stride, ids.size(), total) || !valid_range(packed.address, total)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} packed blocks of {} bytes at {:#x}: the regions need {} bytes "
                         "per block",
                         device_name_, ids.size(), packed_stride, packed.address,
                         packed_extent(table.regions()));
  }
  return enqueue(
      PackWork{gathers, table.regions(), {ids.begin(), ids.end()}, packed, packed_stride});
}

Status HostStream::gather(const RegionTable& table,
                          std::span<const std::uint32_t> ids,
                          DevicePtr packed,
                          std::uint64_t packed_stride) {
  return enqueue_pack(true, table, ids, packed, packed_stride);
}

Status HostStream::scatter(const RegionTable& table,
                           std::span<const std::uint32_t> ids,
                           DevicePtr packed,
                           std::uint64_t packed_stride) {
  return enqueue_pack(false, table, ids, packed, packed_stride);
}

Status HostStream::fill_pattern(const RegionTable& table,
                                std::span<const kernels::SeededBlock> blocks) {
  if (blocks.empty()) return ok();
  return enqueue(PatternWork{table.regions(), {blocks.begin(), blocks.end()}, nullptr});
}

Status HostStream::check_results(PinnedBuffer& results, std::size_t count) const {
  if (results.size_bytes() / sizeof(std::uint64_t) < count) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: a result buffer of {} bytes holds fewer than {} words", device_name_,
                         results.size_bytes(), count);
  }
  return ok();
}

Status HostStream::verify_pattern(const RegionTable& table,
                                  std::span<const kernels::SeededBlock> blocks,
                                  PinnedBuffer& results) {
  if (blocks.empty()) return ok();
  KVFERRY_TRY(check_results(results, blocks.size()));
  return enqueue(PatternWork{table.regions(),
                             {blocks.begin(), blocks.end()},
                             reinterpret_cast<std::uint64_t*>(results.data())});
}

Status HostStream::checksum(const RegionTable& table,
                            std::span<const std::uint32_t> ids,
                            PinnedBuffer& results) {
  if (ids.empty()) return ok();
  KVFERRY_TRY(check_results(results, ids.size()));
  return enqueue(ChecksumWork{
      table.regions(), {ids.begin(), ids.end()}, reinterpret_cast<std::uint64_t*>(results.data())});
}

Status HostStream::notify(int event_fd) {
  // A copy: the number may mean another file by the time the stream gets there.
  UniqueFd copy(::fcntl(event_fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return KVFERRY_ERRNO("{}: eventfd {}", device_name_, event_fd);
  return enqueue(NotifyWork{std::move(copy)});
}

Result<bool> HostStream::query() {
  const std::lock_guard<std::mutex> guard(mutex_);
  return queue_.empty() && !running_;
}

}  // namespace kvferry::ipc
