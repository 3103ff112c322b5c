// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "options.hpp"
#include "replay/trace.hpp"

#include <cstdint>
#include <string>

namespace kvferry::cli {

/// Requests of a trace, or made up.
struct WorkloadOptions {
  std::string trace;  ///< A file; empty: made up.
  std::string workload = "conversation";
  std::uint64_t requests = 0;  ///< 0: all of the trace, or kMadeUpRequests.
  bool skip_bad = false;
  bool ids_suffice = false;  ///< Of a trace: nobody asks for its times and lengths.
  std::uint64_t seed = 0;
};
inline constexpr std::uint64_t kMadeUpRequests = 2'000;
inline constexpr std::uint64_t kMaxRequests = 100'000'000;

/// --trace, --workload, --requests, --seed and --skip-bad.
void add_workload_options(CLI::App& app, WorkloadOptions& options);
/// kInvalidArgument as check_uses(): --seed does not count with a trace.
[[nodiscard]] ipc::Status check_workload_uses(const CLI::App& app,
                                              const Arguments& arguments,
                                              const WorkloadOptions& options);
/// @throws nothing; errors as of read_trace() and generate_workload()
[[nodiscard]] ipc::Result<Trace> get_trace(const WorkloadOptions& options);
/// For reports.
[[nodiscard]] std::string describe(const WorkloadOptions& options);

}  // namespace kvferry::cli
