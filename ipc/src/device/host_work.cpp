// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_work.hpp"

#include "device/word_news.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace kvferry::ipc::host_work {
namespace {

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): of the thread alone
thread_local const std::atomic<bool>* this_stream_ends = nullptr;

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

}  // namespace

void Copy::run() const {
  for (const CopyOp& op : ops) {
    const bool to_host = direction == CopyDirection::kDeviceToHost;
    std::memcpy(to_host ? op.host : op.device.raw(), to_host ? op.device.raw() : op.host,
                op.size_bytes);
  }
}

void CopyRows::run() const {
  for (const RowCopyOp& op : ops) {
    for (std::uint64_t row = 0; row < op.rows; ++row) {
      void* host = static_cast<std::byte*>(op.host) + row * op.host_pitch;
      void* device = (op.device + row * op.device_pitch).raw();
      const bool to_host = direction == CopyDirection::kDeviceToHost;
      std::memcpy(to_host ? host : device, to_host ? device : host, op.row_bytes);
    }
  }
}

void Zero::run() const { std::memset(target.raw(), 0, size_bytes); }

void CopyWithin::run() const { std::memcpy(target.raw(), source.raw(), size_bytes); }

void Pack::run() const {
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

void Pattern::run() const {
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

void Checksum::run() const {
  in_launches(ids, kernels::kMaxBlocksPerLaunch, [&](auto part, std::size_t first) {
    kernels::host::checksum(regions.data(), static_cast<std::uint32_t>(regions.size()),
                            to_block_ids(part), results + first);
  });
}

void Decode::run() const {
  kernels::host::decode(regions.data(), static_cast<std::uint32_t>(regions.size()), pass);
}

void Fold::run() const {
  kernels::host::fold(static_cast<const unsigned char*>(source.raw()), size_bytes, seed,
                      static_cast<std::uint64_t*>(sums.raw()));
}

void Expand::run() const {
  kernels::host::expand(static_cast<const unsigned char*>(source.raw()), source_bytes,
                        static_cast<unsigned char*>(target.raw()), target_bytes);
}

void WaitWord::run() const {
  word_news::wait(word, at_least, [] {
    return this_stream_ends != nullptr && this_stream_ends->load(std::memory_order_relaxed);
  });
}

void set_end(const std::atomic<bool>* ends) noexcept { this_stream_ends = ends; }

void Launch::run() const {
  for (const Item& item : list->items) {
    std::visit([](const auto& work) { work.run(); }, item);
  }
}

void Notify::run() const {
  const std::uint64_t one = 1;
  ssize_t count = 0;
  do {
    // wait-none: an eventfd of ours, O_NONBLOCK
    count = ::write(event_fd.get(), &one, sizeof(one));
  } while (count < 0 && errno == EINTR);
  if (count < 0) log_error("host stream: notify: {}", KVFERRY_ERRNO("write eventfd").message);
}

}  // namespace kvferry::ipc::host_work
