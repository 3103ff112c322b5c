// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "decode_graph.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>

namespace kvferry::worker {

using ipc::DevicePtr;
using ipc::Status;
using kernels::StridedRegion;
using kernels::TokenRead;
using kernels::TokenWrite;

namespace {

constexpr std::uint64_t kOutputBytes = DecodeGraph::kMaxSequences * sizeof(std::uint64_t);
constexpr std::uint64_t kCountBytes = 2 * sizeof(std::uint32_t);
constexpr std::uint64_t kWriteBytes = DecodeGraph::kMaxWrites * sizeof(TokenWrite);
constexpr std::uint64_t kGroupBytes =
    kCountBytes + kWriteBytes + DecodeGraph::kMaxReads * sizeof(TokenRead);

bool same_region(const StridedRegion& a, const StridedRegion& b) {
  return a.base == b.base && a.block_stride == b.block_stride && a.block_bytes == b.block_bytes &&
         a.salt == b.salt;
}

std::span<const StridedRegion> regions_of(const GroupView& group) {
  const ipc::RegionTable* const table = group.table(ipc::RegionSet::kAll);
  return table == nullptr ? std::span<const StridedRegion>() : table->regions();
}

}  // namespace

bool DecodeGraph::takes(const std::vector<GroupPass>& groups, std::uint32_t sequences) const {
  return !busy_ && sequences <= kMaxSequences &&
         std::all_of(groups.begin(), groups.end(), [](const GroupPass& group) {
           return group.writes.size() <= kMaxWrites && group.reads.size() <= kMaxReads;
         });
}

bool DecodeGraph::is_bound_to(const MappedArena& arena, DevicePtr tables) const {
  if (work_ == nullptr || bound_tables_ != tables || tables_.size() != arena.groups.size()) {
    return false;
  }
  for (std::size_t g = 0; g < tables_.size(); ++g) {
    const std::span<const StridedRegion> here = regions_of(arena.groups[g]);
    const std::span<const StridedRegion> bound = tables_[g]->regions();
    if (!std::equal(here.begin(), here.end(), bound.begin(), bound.end(), same_region)) {
      return false;
    }
  }
  return true;
}

Status DecodeGraph::make_buffers(std::size_t groups) {
  const std::uint64_t input_bytes = groups * kGroupBytes;
  if (memory_.size_bytes() == kOutputBytes + input_bytes) return ipc::ok();
  work_.reset();
  memory_ = {};
  device_bytes_.store(0);
  KVFERRY_ASSIGN(ScratchBuffer memory, allocator_.allocate(kOutputBytes + input_bytes));
  if (inputs_ == nullptr || inputs_->size_bytes() != input_bytes) {
    KVFERRY_ASSIGN(inputs_, device_.make_pinned_buffer(input_bytes));
  }
  if (outputs_ == nullptr) {
    KVFERRY_ASSIGN(outputs_, device_.make_pinned_buffer(kOutputBytes));
  }
  memory_ = std::move(memory);  // Last: they are all there.
  device_bytes_.store(memory_.size_bytes());
  return ipc::ok();
}

Status DecodeGraph::record(const MappedArena& arena,
                           ipc::Stream& stream,
                           DevicePtr tables,
                           std::uint32_t tokens_per_block) {
  work_.reset();
  tables_.clear();
  KVFERRY_TRY(make_buffers(arena.groups.size()));
  for (const GroupView& group : arena.groups) {
    const std::span<const StridedRegion> regions = regions_of(group);
    KVFERRY_ASSIGN(auto table, device_.make_region_table({regions.begin(), regions.end()}));
    tables_.push_back(std::move(table));
  }
  const DevicePtr outputs = memory_.address();
  const DevicePtr inputs = outputs + kOutputBytes;
  KVFERRY_ASSIGN(work_, stream.record([&](ipc::Stream& recording) -> Status {
    const std::array upload{ipc::CopyOp{inputs_->data(), inputs, tables_.size() * kGroupBytes}};
    KVFERRY_TRY(recording.copy(ipc::CopyDirection::kHostToDevice, upload, ipc::CopyMode::kEach));
    KVFERRY_TRY(recording.zero(outputs, kOutputBytes));
    for (std::size_t g = 0; g < tables_.size(); ++g) {
      const DevicePtr counts = inputs + g * kGroupBytes;
      kernels::DecodePass pass;
      pass.counts = static_cast<const std::uint32_t*>(counts.raw());
      pass.writes = static_cast<const TokenWrite*>((counts + kCountBytes).raw());
      pass.reads = static_cast<const TokenRead*>((counts + (kCountBytes + kWriteBytes)).raw());
      pass.model = static_cast<const std::uint64_t*>(tables.raw());
      pass.outputs = static_cast<std::uint64_t*>(outputs.raw());
      pass.max_writes = kMaxWrites;
      pass.max_reads = kMaxReads;
      pass.max_sequences = kMaxSequences;
      pass.tokens_per_block = tokens_per_block;
      KVFERRY_TRY(recording.decode(*tables_[g], pass));
    }
    const std::array download{ipc::CopyOp{outputs_->data(), outputs, kOutputBytes}};
    return recording.copy(ipc::CopyDirection::kDeviceToHost, download, ipc::CopyMode::kEach);
  }));
  bound_tables_ = tables;
  ++recordings_;
  ipc::log_info("decode graph: recorded for epoch={} ({} groups), the {}. time", arena.epoch.value,
                tables_.size(), recordings_);
  return ipc::ok();
}

std::uint64_t DecodeGraph::release() {
  const std::uint64_t bytes = memory_.size_bytes();
  if (bytes > 0) released_groups_ = (bytes - kOutputBytes) / kGroupBytes;
  give_up();
  inputs_.reset();
  outputs_.reset();
  return bytes;
}

void DecodeGraph::give_up() {
  KVFERRY_CHECK(!busy_, "the decode graph was given up under a launch");
  work_.reset();
  tables_.clear();
  memory_ = {};
  device_bytes_.store(0);
}

ipc::Result<std::uint64_t> DecodeGraph::resume() {
  if (released_groups_ == 0) return 0;
  KVFERRY_TRY(make_buffers(released_groups_));
  released_groups_ = 0;
  return memory_.size_bytes();
}

void DecodeGraph::write_inputs(const std::vector<GroupPass>& groups) {
  for (std::size_t g = 0; g < groups.size(); ++g) {
    std::byte* const at = inputs_->data() + g * kGroupBytes;
    const std::array counts{static_cast<std::uint32_t>(groups[g].writes.size()),
                            static_cast<std::uint32_t>(groups[g].reads.size())};
    std::memcpy(at, counts.data(), kCountBytes);
    const auto put = [](std::byte* to, const auto& items) {
      if (!items.empty()) std::memcpy(to, items.data(), items.size() * sizeof(items[0]));
    };
    put(at + kCountBytes, groups[g].writes);
    put(at + kCountBytes + kWriteBytes, groups[g].reads);
  }
}

Status DecodeGraph::launch(const std::vector<GroupPass>& groups,
                           const MappedArena& arena,
                           ipc::Stream& stream,
                           DevicePtr tables,
                           std::uint32_t tokens_per_block) {
  if (!is_bound_to(arena, tables)) KVFERRY_TRY(record(arena, stream, tables, tokens_per_block));
  write_inputs(groups);
  KVFERRY_TRY(stream.launch(*work_));
  ++launches_;
  busy_ = true;
  return ipc::ok();
}

ipc::DecodeReply DecodeGraph::take_outputs(std::uint32_t sequences) {
  ipc::DecodeReply reply;
  reply.outputs.resize(sequences);
  std::memcpy(reply.outputs.data(), outputs_->data(), sequences * sizeof(std::uint64_t));
  busy_ = false;
  return reply;
}

}  // namespace kvferry::worker
