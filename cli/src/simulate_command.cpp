// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "kvferry/cache_manager/eviction_policy.hpp"
#include "must.hpp"
#include "options.hpp"
#include "print.hpp"
#include "replay/workload.hpp"
#include "run/report_file.hpp"
#include "run_options.hpp"
#include "simulate/report.hpp"
#include "simulate/simulation.hpp"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr const char* kSimulateDescription =
    "Plays a trace through caches of prefixes without data, one for each policy and capacity, and "
    "tells what part of all blocks each would have had. A block counts as found when all blocks "
    "before it in its request are, too. The policies are the ones that the manager evicts by; "
    "optimal is one that knows the future: where equal blocks always follow equal prefixes, and "
    "none comes twice in a request, no other finds more. Without --trace it makes up requests, as "
    "kvferry replay does.";

constexpr const char* kSimulateExample =
    "examples:\n"
    "  kvferry simulate --trace conversation_trace.jsonl\n"
    "  kvferry simulate --trace t.jsonl --capacity 1000,10000 --policy lru,reuse --json\n"
    "  kvferry simulate --trace t.jsonl --plot hits.svg\n\n"
    "A trace holds one JSON object a line: {\"hash_ids\": [one id per prefix block]}, and other\n"
    "fields if it likes; the timestamp and lengths that kvferry replay needs are not.";

/// Without --capacity: such parts of the distinct blocks.
constexpr std::array kDefaultParts = {0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4};

constexpr std::uint32_t kMostCapacity = 1U << 31U;

struct SimulateOptions {
  CommonOptions common;
  WorkloadOptions workload;
  std::vector<std::uint64_t> capacities;
  std::vector<std::string> policies = {"all"};
  std::string plot_file;
  bool json = false;
  cache_manager::Watermarks ahead;
};

std::vector<std::string> all_policies() {
  std::vector<std::string> names;
  for (const std::string_view name : cache_manager::eviction_policies()) names.emplace_back(name);
  names.emplace_back(kOptimalPolicy);
  return names;
}

ipc::Result<std::uint64_t> parse_capacity(std::string_view text) {
  return parse_count(text, kMostCapacity);
}

ipc::Result<std::string> parse_policy(std::string_view text) {
  const std::vector<std::string> known = all_policies();
  if (text == "all" || std::find(known.begin(), known.end(), text) != known.end()) {
    return std::string(text);
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of all|{}", text, fmt::join(known, "|"));
}

void add_simulate_options(CLI::App& app, SimulateOptions& options) {
  add_workload_options(app, options.workload);
  add_list<std::uint64_t>(
      app, "--capacity", options.capacities, parse_capacity,
      "Blocks that the cache holds, each number once [0.5 % to 40 % of the distinct ones]")
      ->type_name("N[,...]");
  add_list<std::string>(
      app, "--policy", options.policies, parse_policy,
      fmt::format("all, or any of {}, each once", fmt::join(all_policies(), ", ")))
      ->type_name("NAME[,...]")
      ->default_str("all");
  add_parsed<cache_manager::Watermarks>(
      app, "--evict-ahead", options.ahead, cache_manager::parse_watermarks,
      "Once less than LOW percent of the cache are free after a request, blocks go until HIGH "
      "percent are, as with the manager's option [they go when others need their place]")
      ->type_name("LOW:HIGH");
  add_output_file(app, "--plot", options.plot_file, "Draw hit rate over capacity as SVG")
      ->type_name("FILE.svg");
  app.add_flag("--json", options.json, "Tell as JSON, on standard output");
}

std::vector<std::uint64_t> capacities_of(const SimulateOptions& options, const BlockTrace& trace) {
  std::vector<std::uint64_t> capacities = options.capacities;
  if (capacities.empty()) {
    for (const double part : kDefaultParts) {
      capacities.push_back(
          std::max<std::uint64_t>(1, static_cast<std::uint64_t>(part * trace.distinct)));
    }
  }
  std::sort(capacities.begin(), capacities.end());
  capacities.erase(std::unique(capacities.begin(), capacities.end()), capacities.end());
  return capacities;
}

std::vector<std::string> policies_of(const SimulateOptions& options) {
  const std::vector<std::string> all = all_policies();
  std::vector<std::string> policies;
  for (const std::string& name : options.policies) {
    for (const std::string& each : name == "all" ? all : std::vector<std::string>{name}) {
      if (std::find(policies.begin(), policies.end(), each) == policies.end()) {
        policies.push_back(each);
      }
    }
  }
  return policies;
}

}  // namespace

int simulate_command(const Arguments& arguments) {
  SimulateOptions options;
  options.common.log_level = ipc::LogLevel::kWarn;
  options.workload.ids_suffice = true;
  auto app = make_app("simulate", kSimulateDescription, kSimulateExample, options.common);
  add_simulate_options(*app, options);
  if (const auto code = parse_arguments(*app, arguments)) return *code;
  ipc::init_logging("simulate", options.common.log_level);
  if (const auto used = check_workload_uses(*app, arguments, options.workload); !used) {
    return usage_error(*app, used.error());
  }
  try {
    const Trace read = must(get_trace(options.workload));
    const BlockTrace trace = number_blocks(read.requests);
    SimulationReport report;
    report.workload = describe(options.workload);
    report.requests = trace.requests.size();
    report.skipped_lines = read.skipped_lines;
    report.references = trace.references;
    report.distinct = trace.distinct;
    report.unlimited_hit_rate = trace.unlimited_hit_rate();
    for (const std::string& policy : policies_of(options)) {
      for (const std::uint64_t capacity : capacities_of(options, trace)) {
        report.results.push_back(must(simulate(trace, policy, capacity, options.ahead)));
      }
    }
    if (!options.plot_file.empty()) {
      must(write_report_file(draw_simulation(report), options.plot_file));
    }
    print_out("{}", options.json ? to_json(report).dump(2) + "\n" : table_of(report));
    return kExitDone;
  } catch (const ipc::Exception& error) {
    return failure("simulate", error.error());
  }
}

}  // namespace kvferry::cli
