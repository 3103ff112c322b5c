// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What movers ask of a worker's staging agent, what it answers, and the steps of the reference
// runner: decoded, then held to an arena. What passes must lie inside it.
#include "fuzz.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "stage_check.hpp"
#include "step_plan.hpp"

namespace kvferry::fuzz {
namespace {

using worker::GroupView;
using worker::MappedArena;

constexpr std::uint32_t kBlocks = 10;
constexpr std::uint64_t kPacked = 1024;
constexpr std::uint64_t kPoolBytes = 100'000;

/// Nobody launches with it: the checks ask only whether there is one.
constexpr std::uint32_t kLayers = 8;

/// As many regions as layers, of one size.
class LayersTable final : public ipc::RegionTable {
 public:
  explicit LayersTable(std::uint64_t packed_bytes) : regions_(kLayers) {
    for (kernels::StridedRegion& region : regions_) region.block_bytes = packed_bytes / kLayers;
  }
  [[nodiscard]] std::span<const kernels::StridedRegion> regions() const noexcept override {
    return regions_;
  }

 private:
  std::vector<kernels::StridedRegion> regions_;
};

MappedArena make_arena() {
  MappedArena arena;
  arena.groups.resize(2);
  for (GroupView& group : arena.groups) {
    group.block_count = kBlocks;
    group.packed_bytes = {kPacked, kPacked / 2, kPacked / 2};
    for (std::size_t set = 0; set < group.tables.size(); ++set) {
      group.tables.at(set) = std::make_unique<LayersTable>(group.packed_bytes.at(set));
      for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
        group.layers.at(set).push_back(layer);
      }
    }
  }
  arena.groups[1].tables[GroupView::index(ipc::RegionSet::kReplicated)].reset();
  arena.slot_bytes = 4 * kPacked;
  arena.slots.resize(3);
  return arena;
}

void straight(const ipc::StageRequest& request, const GroupView& group) {
  for (const ipc::StagePart& part : request.parts) {
    KVFERRY_CHECK(group.table(part.set) != nullptr && part.first < request.blocks.size() &&
                      part.count <= request.blocks.size() - part.first &&
                      part.pool_offset <= kPoolBytes &&
                      part.count * group.packed(part.set) <= kPoolBytes - part.pool_offset,
                  "a part outside the pool");
  }
  for (const std::uint32_t block : request.blocks) {
    KVFERRY_CHECK(block < group.block_count, "a block outside the arena");
  }
}

void stage(const ipc::StageRequest& request, const MappedArena& arena) {
  if (!worker::check_stage_request(request, arena, kPoolBytes)) return;
  if (request.layers) {
    KVFERRY_CHECK(request.layers->range.end <= ipc::kMaxLayers &&
                      request.layers->through <= request.layers->range.end,
                  "layers that there are not");
  }
  if (request.kind == ipc::StageKind::kPublish || request.kind == ipc::StageKind::kAwait) {
    KVFERRY_CHECK(request.layers && request.blocks.empty(), "kernels without a slot");
    return;
  }
  const GroupView& group = arena.groups.at(request.group.value);
  if (request.kind == ipc::StageKind::kStore || request.kind == ipc::StageKind::kLoad) {
    straight(request, group);
    return;
  }
  KVFERRY_CHECK(
      request.slot < arena.slots.size() && group.table(request.set) != nullptr &&
          request.blocks.size() * (request.layers ? group.packed(request.set, request.layers->range)
                                                  : group.packed(request.set)) <=
              arena.slot_bytes,
      "a request that does not fit the arena");
  for (const std::uint32_t block : request.blocks) {
    KVFERRY_CHECK(block < group.block_count, "a block outside the arena");
  }
}

void step(const ipc::Step& request, const MappedArena& arena) {
  const auto plan = worker::plan_step(request, arena);
  if (!plan) return;
  for (const worker::GroupStep& part : *plan) {
    const GroupView& group = arena.groups.at(part.group);
    for (const std::uint32_t block : part.reads) {
      KVFERRY_CHECK(block < group.block_count, "a block outside the arena");
    }
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const worker::MappedArena arena = fuzz::make_arena();
  fuzz::Input input(data, size);
  switch (input.byte() % 4) {
    case 0: (void)fuzz::decode_and_check<ipc::AgentHello>(input.rest()); break;
    case 1: (void)fuzz::decode_and_check<ipc::StageReply>(input.rest()); break;
    case 2:
      if (const auto request = fuzz::decode_and_check<ipc::StageRequest>(input.rest())) {
        fuzz::stage(*request, arena);
      }
      break;
    default:
      if (const auto request = fuzz::decode_and_check<ipc::Step>(input.rest())) {
        fuzz::step(*request, arena);
      }
  }
  return 0;
}
