// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "scheduler/batch_plan.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>

namespace kvferry::worker {

using ipc::GroupId;
using ipc::HitRule;

namespace {

/// Keys and values of the tokens [computed, planned) in one group.
void add_writes(const ipc::Geometry& geometry,
                std::uint32_t group,
                const Sequence& sequence,
                ipc::Decode& pass) {
  const std::uint32_t per_block = geometry.tokens_per_block;
  const bool is_state = geometry.groups[group].rule == HitRule::kLastState;
  for (std::uint32_t token = sequence.computed; token < sequence.planned; ++token) {
    const auto held = sequence.table[group].find(token / per_block);
    if (held == sequence.table[group].end()) continue;  // Out of the window by the last token.
    ipc::DecodeWrite write;
    write.group = GroupId{group};
    write.block = held->second.block;
    write.input = sequence.inputs[token];
    if (is_state) {
      // The whole block is the state behind its last token: earlier ones leave nothing.
      const bool last_of_block = (token + 1) % per_block == 0 || token + 1 == sequence.planned;
      if (!last_of_block) continue;
      write.tokens = per_block;
    } else {
      write.first_token = token % per_block;
    }
    pass.writes.push_back(write);
  }
}

void add_reads(const ipc::Geometry& geometry,
               std::uint32_t group,
               const Sequence& sequence,
               ipc::Decode& pass) {
  const std::uint32_t per_block = geometry.tokens_per_block;
  const ipc::GroupSpec& spec = geometry.groups[group];
  const std::uint32_t last = (sequence.length() - 1) / per_block;
  std::uint32_t first = 0;
  if (spec.rule == HitRule::kLastState) first = last;
  if (spec.rule == HitRule::kSlidingWindow && last + 1 > spec.window_blocks) {
    first = last + 1 - spec.window_blocks;
  }
  for (std::uint32_t position = first; position <= last; ++position) {
    const auto held = sequence.table[group].find(position);
    KVFERRY_CHECK(held != sequence.table[group].end(), "a block that is to be read is not held");
    ipc::DecodeRead read;
    read.group = GroupId{group};
    read.block = held->second.block;
    read.tokens = spec.rule == HitRule::kLastState
                      ? per_block
                      : std::min(per_block, sequence.length() - position * per_block);
    read.sequence = pass.sequences;
    read.position = position;
    pass.reads.push_back(read);
  }
}

std::uint64_t reads_of(const ipc::Geometry& geometry, const Sequence& sequence) {
  const std::uint64_t blocks = sequence.length() / geometry.tokens_per_block + 1;
  return blocks * geometry.groups.size();
}

}  // namespace

bool add_to_pass(const ipc::Geometry& geometry,
                 const PassLimits& limits,
                 Sequence& sequence,
                 ipc::Decode& pass) {
  const auto groups = static_cast<std::uint32_t>(geometry.groups.size());
  const auto written = static_cast<std::uint32_t>(pass.writes.size());
  const std::uint32_t room = limits.writes > written ? (limits.writes - written) / groups : 0;
  const std::uint32_t missing = sequence.length() - sequence.computed;
  const bool first = pass.sequences == 0;
  if (pass.sequences >= limits.sequences || (room == 0 && missing > 0 && !first)) return false;
  sequence.planned = sequence.computed + std::min(missing, std::max(room, 1U));
  const bool reads = sequence.planned == sequence.length();
  if (reads && !first && pass.reads.size() + reads_of(geometry, sequence) > limits.reads) {
    return false;
  }
  for (std::uint32_t g = 0; g < groups; ++g) {
    add_writes(geometry, g, sequence, pass);
    if (reads) add_reads(geometry, g, sequence, pass);
  }
  ++pass.sequences;
  return true;
}

}  // namespace kvferry::worker
