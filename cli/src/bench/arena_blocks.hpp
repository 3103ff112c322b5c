// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::cli {

/// The memory of an arena in this process, and where its blocks lie: on the device, and one after
/// the other (packed) in host memory. @threading one thread. @lifetime the device outlives it.
class ArenaBlocks {
 public:
  /// Allocates it. Throws Exception.
  ArenaBlocks(ipc::Device& device, const ipc::ArenaLayout& layout, ipc::HandleKind handles);

  [[nodiscard]] std::size_t groups() const noexcept { return groups_.size(); }
  [[nodiscard]] std::uint32_t block_count(ipc::GroupId group) const {
    return groups_.at(group.value).block_count;
  }
  [[nodiscard]] std::uint64_t packed_bytes(ipc::GroupId group) const {
    return groups_.at(group.value).packed_bytes;
  }
  /// For kernels that gather and scatter packed blocks.
  [[nodiscard]] const ipc::RegionTable& table(ipc::GroupId group) const {
    return *groups_.at(group.value).table;
  }
  [[nodiscard]] ipc::DevicePtr segment(std::uint32_t segment) const {
    return segments_.at(segment)->address();
  }
  /// Appends the copies between a block and its packed form at host: a slice of each region, or
  /// rows of slices that lie at one distance.
  void add_slices(ipc::GroupId group,
                  std::uint32_t block,
                  std::byte* host,
                  std::vector<ipc::CopyOp>& ops) const;
  void add_rows(ipc::GroupId group,
                std::uint32_t block,
                std::byte* host,
                std::vector<ipc::RowCopyOp>& ops) const;
  /// By how many copies each of them moves a block.
  [[nodiscard]] std::size_t slices_of_block(ipc::GroupId group) const {
    return groups_.at(group.value).slices.size();
  }
  [[nodiscard]] std::size_t rows_of_block(ipc::GroupId group) const {
    return groups_.at(group.value).rows.size();
  }

 private:
  struct Slice {
    ipc::DevicePtr base;
    std::uint64_t block_stride = 0;
    std::uint64_t size_bytes = 0;
    std::uint64_t packed_offset = 0;
  };
  /// Slices one after the other in a packed block and at one distance on the device.
  struct Rows {
    Slice first;
    std::uint64_t distance = 0;
    std::uint64_t count = 1;
  };
  struct Group {
    std::vector<Slice> slices;
    std::vector<Rows> rows;
    std::uint32_t block_count = 0;
    std::uint64_t packed_bytes = 0;
    std::unique_ptr<ipc::RegionTable> table;
  };

  [[nodiscard]] static std::vector<Rows> rows_of(const std::vector<Slice>& slices);

  std::vector<std::unique_ptr<ipc::DeviceMemory>> segments_;
  std::vector<Group> groups_;
};

}  // namespace kvferry::cli
