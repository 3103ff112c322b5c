// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "decode_launch.hpp"

#include "kvferry/kernels/reference_model.hpp"

#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace kvferry::worker {

using ipc::Status;
using kernels::TokenRead;
using kernels::TokenWrite;

namespace {

Status check_tokens(std::string_view what,
                    ipc::GroupId group,
                    ipc::BlockId block,
                    std::uint64_t end,
                    const MappedArena& arena,
                    std::uint32_t tokens_per_block) {
  if (group.value >= arena.groups.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "{} names group {}; the arena has {} groups", what,
                         group.value, arena.groups.size());
  }
  if (block.value >= arena.groups[group.value].block_count) {
    return KVFERRY_ERROR(kInvalidArgument, "{} names block {} of group {}, which has {} blocks",
                         what, block.value, group.value, arena.groups[group.value].block_count);
  }
  if (end > tokens_per_block) {
    return KVFERRY_ERROR(kInvalidArgument, "{} names {} tokens of block {}, which holds {}", what,
                         end, block.value, tokens_per_block);
  }
  return ipc::ok();
}

/// Lays the inputs of a pass out behind each other, in host memory as on the device.
class Packer {
 public:
  Packer(std::byte* host, ipc::DevicePtr device) : host_(host), device_(device) {}

  template <typename T> const T* add(std::span<const T> items) {
    static_assert(sizeof(T) % alignof(std::uint32_t) == 0 && alignof(T) <= 8);
    const auto* const there = static_cast<const T*>((device_ + offset_).raw());
    if (!items.empty()) std::memcpy(host_ + offset_, items.data(), items.size_bytes());
    offset_ += items.size_bytes();
    return there;
  }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return offset_; }

 private:
  std::byte* host_;
  ipc::DevicePtr device_;
  std::uint64_t offset_ = 0;
};

}  // namespace

ipc::Result<std::vector<GroupPass>> plan_decode(const ipc::Decode& pass,
                                                const MappedArena& arena,
                                                std::uint32_t tokens_per_block) {
  if (pass.sequences == 0 || pass.sequences > kMaxPassSequences) {
    return KVFERRY_ERROR(kInvalidArgument, "a pass of {} sequences; 1 to {} are allowed",
                         pass.sequences, kMaxPassSequences);
  }
  std::vector<GroupPass> groups(arena.groups.size());
  for (const ipc::DecodeWrite& write : pass.writes) {
    KVFERRY_TRY(check_tokens("write", write.group, write.block,
                             std::uint64_t{write.first_token} + write.tokens, arena,
                             tokens_per_block));
    groups[write.group.value].writes.push_back(
        {write.input, write.block.value, write.first_token, write.tokens, 0});
  }
  for (const ipc::DecodeRead& read : pass.reads) {
    KVFERRY_TRY(check_tokens("read", read.group, read.block, read.tokens, arena, tokens_per_block));
    if (read.sequence >= pass.sequences) {
      return KVFERRY_ERROR(kInvalidArgument, "read names sequence {} of a pass of {}",
                           read.sequence, pass.sequences);
    }
    groups[read.group.value].reads.push_back(
        {read.sequence, read.block.value, read.position, 0, read.tokens, 0});
  }
  return groups;
}

Status launch_decode(const std::vector<GroupPass>& groups,
                     std::uint32_t sequences,
                     const MappedArena& arena,
                     const DecodeTools& tools,
                     DecodeWork& work) {
  work.sequences = sequences;
  const std::uint64_t output_bytes = sequences * sizeof(std::uint64_t);
  std::uint64_t input_bytes = 0;
  for (const GroupPass& group : groups) {
    input_bytes += 2 * sizeof(std::uint32_t) + group.writes.size() * sizeof(TokenWrite) +
                   group.reads.size() * sizeof(TokenRead);
  }
  KVFERRY_ASSIGN(work.workspace, tools.allocator.allocate(output_bytes + input_bytes));
  KVFERRY_ASSIGN(work.inputs, tools.pinned.take(input_bytes / sizeof(std::uint64_t)));
  KVFERRY_ASSIGN(work.outputs, tools.pinned.take(sequences));
  const ipc::DevicePtr outputs = work.workspace.address();
  Packer packer(work.inputs->data(), outputs + output_bytes);
  std::vector<kernels::DecodePass> launches;
  for (const GroupPass& group : groups) {
    kernels::DecodePass launch;
    launch.max_writes = static_cast<std::uint32_t>(group.writes.size());
    launch.max_reads = static_cast<std::uint32_t>(group.reads.size());
    const std::array counts{launch.max_writes, launch.max_reads};
    launch.counts = packer.add(std::span<const std::uint32_t>(counts));
    launch.writes = packer.add(std::span(group.writes));
    launch.reads = packer.add(std::span(group.reads));
    launch.model = static_cast<const std::uint64_t*>(tools.tables.raw());
    launch.outputs = static_cast<std::uint64_t*>(outputs.raw());
    launch.max_sequences = sequences;
    launch.tokens_per_block = tools.tokens_per_block;
    launches.push_back(launch);
  }
  const std::array upload{
      ipc::CopyOp{work.inputs->data(), outputs + output_bytes, packer.size_bytes()}};
  KVFERRY_TRY(tools.stream.copy(ipc::CopyDirection::kHostToDevice, upload, ipc::CopyMode::kEach));
  KVFERRY_TRY(tools.stream.zero(outputs, output_bytes));
  for (std::size_t g = 0; g < launches.size(); ++g) {
    if (launches[g].max_writes + launches[g].max_reads == 0) continue;
    KVFERRY_TRY(tools.stream.decode(*arena.groups[g].table(ipc::RegionSet::kAll), launches[g]));
  }
  const std::array download{ipc::CopyOp{work.outputs->data(), outputs, output_bytes}};
  return tools.stream.copy(ipc::CopyDirection::kDeviceToHost, download, ipc::CopyMode::kEach);
}

ipc::DecodeReply take_outputs(DecodeWork& work, PinnedPool& pinned) {
  ipc::DecodeReply reply;
  reply.outputs.resize(work.sequences);
  if (work.outputs != nullptr) {
    for (std::uint32_t i = 0; i < work.sequences; ++i) {
      reply.outputs[i] = PinnedPool::word(*work.outputs, i);
    }
  }
  pinned.give_back(std::move(work.inputs));
  pinned.give_back(std::move(work.outputs));
  work.workspace = ScratchBuffer();
  return reply;
}

}  // namespace kvferry::worker
