// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_channel.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

/// What a host stream can be given to do, each with all it needs but the memory. run() does it, as
/// often as it is called.
namespace kvferry::ipc::host_work {

using Regions = std::span<const kernels::StridedRegion>;

struct Copy {
  CopyDirection direction;
  std::vector<CopyOp> ops;
  void run() const;
};

struct CopyRows {
  CopyDirection direction;
  std::vector<RowCopyOp> ops;
  void run() const;
};

struct Zero {
  DevicePtr target;
  std::uint64_t size_bytes = 0;
  void run() const;
};

struct CopyWithin {
  DevicePtr source;
  DevicePtr target;
  std::uint64_t size_bytes = 0;
  void run() const;
};

struct Pack {
  bool gathers;
  Regions regions;
  std::vector<std::uint32_t> ids;
  DevicePtr packed;
  std::uint64_t packed_stride;
  void run() const;
};

struct Pattern {
  Regions regions;
  std::vector<kernels::SeededBlock> blocks;
  std::uint64_t* mismatches;  ///< Null: fill instead of verify.
  void run() const;
};

struct Checksum {
  Regions regions;
  std::vector<std::uint32_t> ids;
  std::uint64_t* results;
  void run() const;
};

struct Decode {
  Regions regions;
  kernels::DecodePass pass;
  void run() const;
};

struct Fold {
  DevicePtr source;
  std::uint64_t size_bytes = 0;
  std::uint64_t seed = 0;
  DevicePtr sums;
  void run() const;
};

struct Expand {
  DevicePtr source;
  std::uint64_t source_bytes = 0;
  DevicePtr target;
  std::uint64_t target_bytes = 0;
  void run() const;
};

struct Broadcast {
  std::shared_ptr<HostChannel> channel;
  DevicePtr memory;
  std::uint64_t size_bytes = 0;
  Deadline deadline;
  void run() const { channel->transfer(memory, size_bytes, deadline); }
};

struct WaitWord {
  StreamWord word;
  std::uint32_t at_least = 0;
  void run() const;
};

struct WriteWord {
  StreamWord word;
  std::uint32_t value = 0;
  void run() const { word.store(value); }
};

struct Notify {
  UniqueFd event_fd;  ///< A copy: outlives the caller's.
  void run() const;
};

struct List;

/// Recorded work. Shared by the recording and its launches, which may outlive it.
struct Launch {
  std::shared_ptr<const List> list;
  void run() const;
};

using Item = std::variant<Copy,
                          CopyRows,
                          Zero,
                          CopyWithin,
                          Pack,
                          Pattern,
                          Checksum,
                          Decode,
                          Fold,
                          Expand,
                          Broadcast,
                          WaitWord,
                          WriteWord,
                          Notify,
                          Launch>;

struct List {
  std::vector<Item> items;
};

/// What ends the waits of the calling thread's items: the end of its stream. Null: nothing does.
void set_end(const std::atomic<bool>* ends) noexcept;

}  // namespace kvferry::ipc::host_work
