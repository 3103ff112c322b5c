// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A manager's job for a mover: decoded, held to arena and pool, and planned. Each copy of a plan
// must lie inside both.
#include "fuzz.hpp"
#include "mover/copy_plan.hpp"
#include "support/lease_geometry.hpp"

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
  for (const auto& [slot_bytes, strided] :
       {std::pair(kNone, false), std::pair(kNone, true), std::pair(fuzz::kSlotBytes, false)}) {
    limits.slot_bytes = slot_bytes;
    limits.strided = strided;
    planner.start(mover.parts, job->items, results, limits);
    while (planner.has_next()) {
      planner.plan_next(chunk);
      KVFERRY_CHECK(slot_bytes == 0 || chunk.size_bytes <= slot_bytes, "more than a slot holds");
      for (const cache_manager::CopyRun& run : chunk.runs) {
        fuzz::hold(run, slot_bytes > 0 ? slot_bytes : mover.layout.segment_bytes.at(run.segment));
      }
      for (const cache_manager::CopyRows& rows : chunk.rows) {
        KVFERRY_CHECK(strided, "rows that were not asked for");
        fuzz::hold(rows, mover.layout.segment_bytes.at(rows.segment));
      }
    }
  }
  return 0;
}
