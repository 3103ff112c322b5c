// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/figure.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/worker/client.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::cli {

/// One cache that is measured.
struct BenchShape {
  ipc::Geometry geometry;
  std::string geometry_name;  ///< What --geometry of the processes is: a preset or a file.
  bool is_even = false;       ///< Equal chunks, of no model.

  [[nodiscard]] std::uint32_t regions() const;
  /// Of one block of each group: on one rank, and as all ranks move it.
  [[nodiscard]] std::uint64_t rank_bytes() const;
  [[nodiscard]] std::uint64_t moved_bytes() const;
  [[nodiscard]] BenchPoint point(std::uint32_t blocks, Way way, Locality locality) const;
};

/// A cache of so many equal regions, described by a file in this directory.
[[nodiscard]] ipc::Result<BenchShape> make_even_shape(std::uint64_t chunk_bytes,
                                                      std::uint32_t regions,
                                                      std::uint32_t ranks,
                                                      const std::filesystem::path& dir);
[[nodiscard]] ipc::Result<BenchShape> make_model_shape(const std::string& geometry_name,
                                                       std::uint32_t ranks);

/// Jobs of one way, which take turns.
struct JobPlan {
  std::uint32_t blocks = 0;     ///< Of one job, in every group.
  std::uint32_t jobs = 0;       ///< Of different blocks.
  std::uint32_t in_flight = 0;  ///< So many at a time: the link never waits for the next one.
};
/// span_bytes: of all jobs together, so that no cache of a processor holds them, but not more than
/// 256 jobs for that.
[[nodiscard]] JobPlan plan_jobs(const BenchShape& shape,
                                std::uint32_t blocks,
                                std::uint64_t span_bytes);

/// Device blocks of each job of a plan: jobs of both ways never share one. lane: 0 or 1.
[[nodiscard]] std::vector<std::vector<worker::SequenceItem>> job_blocks(
    const BenchShape& shape,
    const JobPlan& plan,
    Locality locality,
    std::uint32_t lane,
    const std::vector<std::uint32_t>& group_blocks);
/// --gpu-blocks for plans of both ways.
[[nodiscard]] ipc::Result<std::uint32_t> gpu_blocks_for(const BenchShape& shape,
                                                        const std::vector<JobPlan>& plans);

}  // namespace kvferry::cli
