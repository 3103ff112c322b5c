// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What movers ask of a worker's staging agent, what it answers, and the steps of the reference
// runner: decoded, then held to an arena. What passes must lie inside it.
#include "fuzz.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "stage_check.hpp"
#include "step_plan.hpp"

namespace kvferry::fuzz {
namespace {

using worker::GroupView;
using worker::MappedArena;

constexpr std::uint32_t kBlocks = 10;
constexpr std::uint64_t kPacked = 1024;

/// Nobody launches with it: the checks ask only whether there is one.
class EmptyTable final : public ipc::RegionTable {
 public:
  [[nodiscard]] std::span<const kernels::StridedRegion> regions() const noexcept override {
    return {};
  }
};

MappedArena make_arena() {
  MappedArena arena;
  arena.groups.resize(2);
  for (GroupView& group : arena.groups) {
    group.block_count = kBlocks;
    for (auto& table : group.tables) table = std::make_unique<EmptyTable>();
    group.packed_bytes = {kPacked, kPacked / 2, kPacked / 2};
  }
  arena.groups[1].tables[GroupView::index(ipc::RegionSet::kReplicated)].reset();
  arena.slot_bytes = 4 * kPacked;
  arena.slots.resize(3);
  return arena;
}

void stage(const ipc::StageRequest& request, const MappedArena& arena) {
  if (!worker::check_stage_request(request, arena)) return;
  const GroupView& group = arena.groups.at(request.group.value);
  KVFERRY_CHECK(request.slot < arena.slots.size() && group.table(request.set) != nullptr &&
                    request.blocks.size() * group.packed(request.set) <= arena.slot_bytes,
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
