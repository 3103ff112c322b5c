// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/workload.hpp"

#include "replay/generator.hpp"
#include "run_options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>

namespace kvferry::cli {
namespace {

/// A slip in the name is told before anything starts.
ipc::Result<std::string> parse_trace_name(std::string_view text) {
  const std::string name(text);
  if (std::filesystem::is_directory(name)) {
    return KVFERRY_ERROR(kInvalidArgument, "'{}' is a directory, not a trace", text);
  }
  if (::access(name.c_str(), R_OK) != 0) return KVFERRY_ERRNO("'{}' cannot be read", text);
  return name;
}

}  // namespace

void add_workload_options(CLI::App& app, WorkloadOptions& options) {
  auto* trace =
      add_parsed<std::string>(app, "--trace", options.trace, parse_trace_name, "Play this trace")
          ->type_name("FILE");
  app.add_option("--workload", options.workload, "Without a trace: what to make up")
      ->type_name("conversation")
      ->check(CLI::IsMember({"conversation"}))
      ->default_str(options.workload)
      ->excludes(trace);
  app.add_option("--requests", options.requests,
                 fmt::format("How many [the whole trace; made-up ones: {}]", kMadeUpRequests))
      ->type_name("N")
      ->check(CLI::Range(std::uint64_t{1}, kMaxRequests));
  add_seed(app, options.seed, "Made-up requests repeat exactly from it");
  app.add_flag("--skip-bad", options.skip_bad, "Count malformed trace lines and go on");
}

ipc::Status check_workload_uses(const CLI::App& app,
                                const Arguments& arguments,
                                const WorkloadOptions& options) {
  return check_uses(app, arguments,
                    {{"--seed", options.trace.empty(),
                      fmt::format("requests that are made up, not --trace {}", options.trace)}});
}

ipc::Result<Trace> get_trace(const WorkloadOptions& options) {
  if (!options.trace.empty()) {
    return read_trace(std::filesystem::path(options.trace), {.max_requests = options.requests,
                                                             .skip_bad = options.skip_bad,
                                                             .ids_suffice = options.ids_suffice});
  }
  Trace trace;
  KVFERRY_ASSIGN(
      trace.requests,
      generate_workload(options.workload,
                        options.requests == 0 ? kMadeUpRequests : options.requests, options.seed));
  return trace;
}

std::string describe(const WorkloadOptions& options) {
  return options.trace.empty() ? fmt::format("{}, seed {}", options.workload, options.seed)
                               : options.trace;
}

}  // namespace kvferry::cli
