// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "step_plan.hpp"

#include <algorithm>
#include <string_view>

namespace kvferry::worker {

using ipc::Result;
using ipc::Status;

namespace {

Status check_block(std::string_view what,
                   ipc::GroupId group,
                   ipc::BlockId block,
                   const MappedArena& arena) {
  if (group.value >= arena.groups.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "{} names group {}; the arena has {} groups", what,
                         group.value, arena.groups.size());
  }
  if (block.value >= arena.groups[group.value].block_count) {
    return KVFERRY_ERROR(kInvalidArgument, "{} names block {} of group {}, which has {} blocks",
                         what, block.value, group.value, arena.groups[group.value].block_count);
  }
  return ipc::ok();
}

Status check_filled_once(const GroupStep& work) {
  std::vector<std::uint32_t> ids;
  ids.reserve(work.fills.size());
  for (const kernels::SeededBlock& fill : work.fills) ids.push_back(fill.id);
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) {
    return KVFERRY_ERROR(kInvalidArgument, "block {} of group {} is filled twice in one step",
                         *twice, work.group);
  }
  return ipc::ok();
}

}  // namespace

Result<std::vector<GroupStep>> plan_step(const ipc::Step& step, const MappedArena& arena) {
  if (step.decode_steps > kMaxDecodeSteps) {
    return KVFERRY_ERROR(kInvalidArgument, "a step of {} decode passes; at most {} are allowed",
                         step.decode_steps, kMaxDecodeSteps);
  }
  std::vector<GroupStep> groups(arena.groups.size());
  for (std::uint32_t g = 0; g < groups.size(); ++g) groups[g].group = g;
  for (const ipc::SeededItem& item : step.fills) {
    KVFERRY_TRY(check_block("fill", item.group, item.block, arena));
    groups[item.group.value].fills.push_back({item.seed, item.block.value, 0});
  }
  for (const ipc::StepBlock& item : step.reads) {
    KVFERRY_TRY(check_block("read", item.group, item.block, arena));
    groups[item.group.value].reads.push_back(item.block.value);
  }
  for (std::uint32_t i = 0; i < step.verifies.size(); ++i) {
    const ipc::SeededItem& item = step.verifies[i];
    KVFERRY_TRY(check_block("verify", item.group, item.block, arena));
    groups[item.group.value].verifies.push_back({item.seed, item.block.value, 0});
    groups[item.group.value].verify_places.push_back(i);
  }
  for (const GroupStep& work : groups) KVFERRY_TRY(check_filled_once(work));
  std::erase_if(groups, [](const GroupStep& work) {
    return work.fills.empty() && work.reads.empty() && work.verifies.empty();
  });
  return groups;
}

}  // namespace kvferry::worker
