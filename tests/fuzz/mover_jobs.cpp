// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A manager's job for a mover: decoded, held to arena and pool, and planned. Each copy of a plan
// must lie inside both.
#include "fuzz.hpp"
#include "mover/copy_plan.hpp"
#include "support/lease_geometry.hpp"

#include <tuple>
#include <utility>

namespace kvferry::fuzz {
namespace {

using namespace cache_manager;

constexpr std::uint64_t kPoolBytes = 1U << 20;
constexpr std::uint64_t kSlotBytes = 1U << 16;  // Some blocks.

/// What a mover knows of its arena and limits. Small pieces, so that copies are cut.
struct Mover {
  ipc::ArenaLayout layout =
      test::small_layout(test::small_geometry(2, 1), ipc::ArenaOrder::kLayerFirst);
  BlockParts parts{layout};
};

void hold(const CopyRun& run, std::uint64_t device_bytes) {
  KVFERRY_CHECK(
      run.size_bytes <= device_bytes && run.device_offset <= device_bytes - run.size_bytes,
      "a copy outside its segment or slot");
  KVFERRY_CHECK(run.size_bytes <= kPoolBytes && run.pool_offset <= kPoolBytes - run.size_bytes,
                "a copy outside the pool");
}

void hold(const PackedRun& run, const PlannedChunk& chunk) {
  KVFERRY_CHECK(run.count > 0 && run.first + run.count <= chunk.blocks.size(),
                "blocks of no chunk");
  KVFERRY_CHECK(run.part_bytes > 0 && run.count <= kPoolBytes / run.part_bytes &&
                    run.pool_offset <= kPoolBytes - run.count * run.part_bytes,
                "a kernel outside the pool");
}

void hold(const CopyRows& rows, std::uint64_t device_bytes) {
  KVFERRY_CHECK(rows.rows > 1 && rows.row_bytes > 0, "rows that are none");
  KVFERRY_CHECK(rows.device_pitch >= rows.row_bytes && rows.pool_pitch >= rows.row_bytes,
                "rows that overlap");
  hold(CopyRun{rows.segment, rows.device_offset + (rows.rows - 1) * rows.device_pitch,
               rows.pool_offset + (rows.rows - 1) * rows.pool_pitch, rows.row_bytes},
       device_bytes);
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const fuzz::Mover mover;
  fuzz::Input input(data, size);
  cache_manager::PlanLimits limits;
  limits.pool_piece_bytes = 1ULL << (10U + input.byte() % 8U);
  const auto job = fuzz::decode_and_check<ipc::MoverJob>(input.rest());
  if (!job) return 0;
  std::vector<std::uint8_t> results;
  for (const ipc::MoverItem& item : job->items) {
    const auto wrong = cache_manager::check_item(item, mover.layout, mover.parts, fuzz::kPoolBytes);
    results.push_back(wrong ? static_cast<std::uint8_t>(wrong->code) : 0);
  }
  cache_manager::CopyPlanner planner;
  cache_manager::PlannedChunk chunk;
  constexpr std::uint64_t kNone = 0;
  limits.step_bytes = 1ULL << (8U + results.size() % 8U);
  for (const auto& [slot_bytes, strided, layered, kernel] :
       {std::tuple(kNone, false, false, false), std::tuple(kNone, true, false, false),
        std::tuple(fuzz::kSlotBytes, false, false, false), std::tuple(kNone, false, true, false),
        std::tuple(fuzz::kSlotBytes, false, true, false), std::tuple(kNone, false, false, true)}) {
    limits.slot_bytes = slot_bytes;
    limits.strided = strided;
    limits.layered = layered;
    limits.kernel = kernel;
    std::uint32_t through = 0;
    bool last = false;
    planner.start(mover.parts, job->items, results, limits);
    while (planner.has_next()) {
      KVFERRY_CHECK(!last, "a chunk after the last one");
      planner.plan_next(chunk);
      KVFERRY_CHECK(!layered || (chunk.through >= through && chunk.through <= chunk.range.end),
                    "layers out of their order");
      through = chunk.through;
      last = chunk.last;
      KVFERRY_CHECK(slot_bytes == 0 || chunk.size_bytes <= slot_bytes, "more than a slot holds");
      for (const cache_manager::CopyRun& run : chunk.runs) {
        fuzz::hold(run, slot_bytes > 0 ? slot_bytes : mover.layout.segment_bytes.at(run.segment));
      }
      for (const cache_manager::PackedRun& run : chunk.packed) {
        KVFERRY_CHECK(kernel, "a kernel that was not asked for");
        fuzz::hold(run, chunk);
      }
      for (const cache_manager::CopyRows& rows : chunk.rows) {
        KVFERRY_CHECK(strided, "rows that were not asked for");
        fuzz::hold(rows, mover.layout.segment_bytes.at(rows.segment));
      }
    }
    KVFERRY_CHECK(!layered || last || through == 0, "layers without an end");
  }
  return 0;
}
