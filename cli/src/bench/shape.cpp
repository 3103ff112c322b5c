// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/shape.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "rank_options.hpp"
#include "replay/sizing.hpp"
#include "run/report_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace kvferry::cli {
namespace {

/// Of the order in which random blocks are drawn: the same in every run.
constexpr std::uint64_t kSeed = 1;
constexpr std::uint32_t kLanes = 2;
constexpr std::uint32_t kLeastInFlight = 2;
constexpr std::uint32_t kMostJobs = 256;
constexpr std::uint32_t kMostInFlight = 16;

constexpr const char* kEvenGeometry = R"(name = "{}"
tokens_per_block = 16

[[group]]
name = "main"

  [[group.regions]]
  kind = "other"
  layers = {}
  dtype = "uint8"
  replicated = false
  bytes_per_block = {}
)";

}  // namespace

std::uint32_t BenchShape::regions() const {
  std::size_t regions = 0;
  for (const ipc::GroupSpec& group : geometry.groups) regions += group.regions.size();
  return static_cast<std::uint32_t>(regions);
}

std::uint64_t BenchShape::rank_bytes() const {
  std::uint64_t bytes = 0;
  for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
    bytes += geometry.replicated_bytes(ipc::GroupId{g}) + geometry.sharded_bytes(ipc::GroupId{g});
  }
  return bytes;
}

std::uint64_t BenchShape::moved_bytes() const { return host_bytes_per_block(geometry); }

BenchPoint BenchShape::point(std::uint32_t blocks, Way way, Locality locality) const {
  BenchPoint point;
  if (!is_even) point.geometry = geometry.name;
  point.chunk_bytes = rank_bytes() / std::max(1U, regions());
  point.regions = regions();
  point.block_bytes = moved_bytes();
  point.blocks = blocks;
  point.way = way;
  point.locality = locality;
  return point;
}

ipc::Result<BenchShape> make_even_shape(std::uint64_t chunk_bytes,
                                        std::uint32_t regions,
                                        std::uint32_t ranks,
                                        const std::filesystem::path& dir) {
  std::uint64_t all_ranks = 0;
  if (!ipc::checked_mul(chunk_bytes, ranks, all_ranks)) {
    return KVFERRY_ERROR(kInvalidArgument, "chunks of {} bytes on {} ranks are too large",
                         chunk_bytes, ranks);
  }
  const std::string name = fmt::format("{}-regions-of-{}", regions, chunk_bytes);
  const std::filesystem::path file = dir / (name + ".toml");
  KVFERRY_TRY(write_report_file(fmt::format(kEvenGeometry, name, regions, all_ranks), file));
  KVFERRY_ASSIGN(BenchShape shape, make_model_shape(file.string(), ranks));
  shape.is_even = true;
  return shape;
}

ipc::Result<BenchShape> make_model_shape(const std::string& geometry_name, std::uint32_t ranks) {
  BenchShape shape;
  KVFERRY_ASSIGN(shape.geometry, find_geometry(geometry_name, ranks));
  shape.geometry_name = geometry_name;
  return shape;
}

JobPlan plan_jobs(const BenchShape& shape, std::uint32_t blocks, std::uint64_t span_bytes) {
  const std::uint64_t job_bytes = std::max<std::uint64_t>(1, blocks * shape.moved_bytes());
  const std::uint64_t jobs = std::clamp<std::uint64_t>((span_bytes + job_bytes - 1) / job_bytes,
                                                       kLeastInFlight, kMostJobs);
  return {blocks, static_cast<std::uint32_t>(jobs),
          static_cast<std::uint32_t>(std::min<std::uint64_t>(jobs, kMostInFlight))};
}

std::vector<std::vector<worker::SequenceItem>> job_blocks(
    const BenchShape& shape,
    const JobPlan& plan,
    Locality locality,
    std::uint32_t lane,
    const std::vector<std::uint32_t>& group_blocks) {
  const std::uint32_t of_lane = plan.blocks * plan.jobs;
  std::vector<std::vector<worker::SequenceItem>> jobs(plan.jobs);
  for (std::uint32_t g = 0; g < shape.geometry.groups.size(); ++g) {
    KVFERRY_CHECK(of_lane * kLanes <= group_blocks.at(g), "the arena has too few blocks");
    std::vector<std::uint32_t> ids(group_blocks[g]);
    std::iota(ids.begin(), ids.end(), 0U);
    std::mt19937_64 random(kSeed);
    if (locality == Locality::kRandom) std::shuffle(ids.begin(), ids.end(), random);
    for (std::uint32_t i = 0; i < of_lane; ++i) {
      jobs[i / plan.blocks].push_back(
          {ipc::GroupId{g}, ipc::BlockId{ids[lane * of_lane + i]}, i % plan.blocks});
    }
  }
  return jobs;
}

ipc::Result<std::uint32_t> gpu_blocks_for(const BenchShape& shape,
                                          const std::vector<JobPlan>& plans) {
  std::uint64_t needed = 0;
  for (const JobPlan& plan : plans) {
    needed = std::max<std::uint64_t>(needed, std::uint64_t{plan.blocks} * plan.jobs * kLanes);
  }
  std::uint64_t most = 0;
  for (const ipc::GroupSpec& group : shape.geometry.groups) {
    const std::uint64_t percent = std::max<std::uint64_t>(1, group.blocks_percent);
    most = std::max(most, (needed * 100 + percent - 1) / percent);
  }
  if (most > ipc::kMaxDeviceBlocks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} device blocks are needed, {} are possible: give less "
                         "--blocks",
                         most, ipc::kMaxDeviceBlocks);
  }
  return static_cast<std::uint32_t>(most);
}

}  // namespace kvferry::cli
