// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/engine_ways.hpp"
#include "probes/copy_ways/kernel_ways.hpp"
#include "probes/copy_ways/way.hpp"

#include <fmt/format.h>

#include <string>
#include <tuple>
#include <utility>

namespace kvferry::probes {
namespace {

/// Where further lanes begin in the sequence: far from where those before them are.
constexpr std::uint64_t kLaneDistance = 9973;
/// What gathers take of the device: few thread blocks, but enough for twice the link.
constexpr KernelShape kGatherShape{
    .copy = KernelCopy::kPlain, .thread_blocks = 16, .warps = 16, .pace_gbps = 0};
constexpr unsigned kWarpsStraightToHost = 4;

std::string counted(unsigned count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

Lane lane(std::unique_ptr<Way> way, Priority priority = Priority::kOrdinary) {
  return {std::move(way), make_stream(priority)};
}

std::vector<Lane> only(Lane lane) {
  std::vector<Lane> lanes;
  lanes.push_back(std::move(lane));
  return lanes;
}

std::vector<Lane> batches(const Scene& scene, unsigned threads) {
  std::vector<Lane> lanes;
  for (unsigned i = 0; i < threads; ++i) {
    lanes.push_back(lane(batch(scene.host_blocks, scene.direction, 0, i * kLaneDistance)));
  }
  return lanes;
}

std::vector<Lane> rows_beside(const Scene& scene, KernelCopy copy, unsigned thread_blocks) {
  const KernelShape shape{
      .copy = copy,
      .thread_blocks = thread_blocks,
      .warps = copy == KernelCopy::kBulk ? 1 : kWarpsStraightToHost,
      .pace_gbps = scene.pace_gbps,
  };
  std::vector<Lane> lanes = only(lane(rows(scene.host_blocks, scene.direction, kRegions)));
  lanes.push_back(lane(kernel_copy(scene.host_blocks, scene.direction, shape, kLaneDistance),
                       Priority::kHighest));
  return lanes;
}

void add_engine_ways(std::vector<WayKind>& ways) {
  for (const auto& [name, size_bytes] :
       {std::pair(kLargeCopyName, kLargeCopyBytes), std::pair("copy-8MiB", kLargeCopyBytes / 4),
        std::pair("copy-2MiB", kLargeCopyBytes / 16)}) {
    ways.push_back({name,
                    fmt::format("cudaMemcpyAsync of {} MiB that lie together", size_bytes >> 20U),
                    [size_bytes = size_bytes](const Scene& scene) {
                      return only(lane(plain_copy(scene.host_blocks, scene.direction, size_bytes)));
                    }});
  }
  for (const std::uint32_t count : {64U, 8U, 4U, 2U}) {
    ways.push_back({fmt::format("rows-{}", count),
                    fmt::format("2D copies of {} rows, a chunk each", count),
                    [count](const Scene& scene) {
                      return only(lane(rows(scene.host_blocks, scene.direction, count)));
                    }});
  }
  for (const unsigned threads : {1U, 2U, 4U}) {
    ways.push_back({fmt::format("batch-{}", threads),
                    "cudaMemcpyBatchAsync of chunks by " + counted(threads, "thread"),
                    [threads](const Scene& scene) { return batches(scene, threads); }});
  }
  ways.push_back({"batch-3d", "cudaMemcpy3DBatchAsync of 64 rows each", [](const Scene& scene) {
                    return only(lane(batch_3d(scene.host_blocks, scene.direction)));
                  }});
  for (const std::uint32_t branches : {1U, 4U}) {
    ways.push_back({fmt::format("graph-{}", branches),
                    fmt::format("a graph of copy nodes, {} side by side", branches),
                    [branches](const Scene& scene) {
                      return only(lane(graph(scene.host_blocks, scene.direction, branches)));
                    }});
  }
  ways.push_back({"chunks", "cudaMemcpyAsync of each chunk", [](const Scene& scene) {
                    return only(lane(single_chunks(scene.host_blocks, scene.direction)));
                  }});
}

void add_gathers(std::vector<WayKind>& ways) {
  ways.push_back(
      {"gather-rows", "2D copies between arena and a ring on the device", [](const Scene& scene) {
         return only(lane(rows(scene.ring_blocks, scene.direction, kRegions), Priority::kHighest));
       }});
  ways.push_back(
      {"gather-batch", "batches of chunks between arena and ring", [](const Scene& scene) {
         return only(lane(batch(scene.ring_blocks, scene.direction, 0), Priority::kHighest));
       }});
  ways.push_back({"gather-batch-overlap", "the same with cudaMemcpyFlagPreferOverlapWithCompute",
                  [](const Scene& scene) {
                    return only(lane(batch(scene.ring_blocks, scene.direction,
                                           cudaMemcpyFlagPreferOverlapWithCompute),
                                     Priority::kHighest));
                  }});
  ways.push_back({"gather-kernel", "a kernel of 16 thread blocks between arena and ring",
                  [](const Scene& scene) {
                    return only(lane(kernel_copy(scene.ring_blocks, scene.direction, kGatherShape),
                                     Priority::kHighest));
                  }});
  ways.push_back(
      {"staged-rows", "gather-rows, and large copies of the ring's slots", [](const Scene& scene) {
         return only(lane(staged(rows(scene.ring_blocks, scene.direction, kRegions),
                                 scene.host_blocks, scene.direction),
                          Priority::kHighest));
       }});
  ways.push_back({"staged-kernel", "gather-kernel, and large copies of the ring's slots",
                  [](const Scene& scene) {
                    return only(
                        lane(staged(kernel_copy(scene.ring_blocks, scene.direction, kGatherShape),
                                    scene.host_blocks, scene.direction),
                             Priority::kHighest));
                  }});
}

void add_thread_blocks(std::vector<WayKind>& ways) {
  for (const auto& [copy, name, what] :
       {std::tuple(KernelCopy::kBulk, "rows+bulk", "bulk copies (TMA), one warp each"),
        std::tuple(KernelCopy::kPlain, "rows+plain", "loads and stores, 4 warps each")}) {
    for (const unsigned thread_blocks : {1U, 2U, 4U}) {
      ways.push_back(
          {fmt::format("{}-{}", name, thread_blocks),
           fmt::format("rows-64, and {} of {}", counted(thread_blocks, "thread block"), what),
           [copy = copy, thread_blocks](const Scene& scene) {
             return rows_beside(scene, copy, thread_blocks);
           }});
    }
  }
}

}  // namespace

const std::vector<WayKind>& all_ways() {
  static const std::vector<WayKind> ways = [] {
    std::vector<WayKind> list;
    add_engine_ways(list);
    add_gathers(list);
    add_thread_blocks(list);
    return list;
  }();
  return ways;
}

}  // namespace kvferry::probes
