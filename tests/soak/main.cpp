// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Clears and re-inits a cache thousands of times, under traffic, while its processes are killed and
// stopped. scripts/soak.sh starts it; docs/reliability.md says what it shows.
#include "kvferry/ipc/base/log.hpp"
#include "options.hpp"
#include "run/run_dir.hpp"
#include "soak/report.hpp"
#include "soak/soak.hpp"
#include "soak/trace_reader.hpp"
#include "table.hpp"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

namespace kvferry::soak {
namespace {

struct Options {
  SoakOptions soak;
  double minutes = 0;
  std::uint32_t ranks = 1;
  std::string device = "host";
  std::string report;
  std::string logs;
};

void add_options(CLI::App& app, Options& options) {
  SoakOptions& soak = options.soak;
  soak.fleet.program = KVFERRY_PROGRAM;
  app.add_option("--cycles", soak.cycles, "Clear and re-init so often")
      ->check(CLI::Range(1U, 100'000'000U))
      ->capture_default_str();
  app.add_option("--minutes", options.minutes, "End after so long, with however many cycles");
  app.add_option("--seed", soak.seed, "Victims and moments repeat from it")->capture_default_str();
  app.add_option("--owner", soak.fleet.owner, "Who owns the arena")
      ->check(CLI::IsMember({"worker", "mover"}))
      ->capture_default_str();
  app.add_option("--handles", soak.fleet.handles, "vmm or legacy")
      ->check(CLI::IsMember({"vmm", "legacy"}))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "A worker and a mover each")
      ->check(CLI::Range(1U, 8U))
      ->capture_default_str();
  app.add_option("--device", options.device, "host, or cuda:N for all ranks")
      ->capture_default_str();
  app.add_option("--geometry", soak.fleet.geometry, "A preset")->capture_default_str();
  app.add_option("--copy-strategy", soak.fleet.copy_strategy, "How movers copy")
      ->capture_default_str();
  app.add_option("--gpu-blocks", soak.fleet.gpu_blocks, "Device blocks of each rank")
      ->check(CLI::Range(16U, 1U << 20U))
      ->capture_default_str();
  app.add_option("--host-memory", soak.fleet.host_memory, "Bytes of host memory for blocks")
      ->capture_default_str();
  app.add_option("--kills", soak.kill_share, "Share of cycles that somebody is killed in")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--stops", soak.stop_share, "Share of cycles that somebody is stopped in")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--look-every", soak.look_every, "Cycles from one look to the next")
      ->check(CLI::Range(1U, 1000U))
      ->capture_default_str();
  soak.around.odd_library = KVFERRY_ODD_LIBRARY;
  app.add_option("--odd", soak.around.odd,
                 "What surrounds all processes: eintr, clock, old-kernel, separated by commas");
  app.add_option("--odd-library", soak.around.odd_library, "What does that")->capture_default_str();
  soak.around.heap_library = KVFERRY_HEAP_LIBRARY;
  app.add_option("--heap-library", soak.around.heap_library,
                 "What counts the live heap of all processes; empty: nothing does")
      ->capture_default_str();
  app.add_flag("--reuse-pids", soak.fleet.reuse_pids,
               "Give a process the number of the dead one that it replaces");
  app.add_option("--forks", soak.around.fork_share, "Share of cycles that the engine forks in")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--program", soak.fleet.program, "The kvferry to test");
  app.add_option("--report", options.report, "Write all figures and series as JSON");
  app.add_option("--logs", options.logs, "Keep the processes' logs there");
  app.add_option_function<std::string>(
         "--inject",
         [&soak](const std::string& what) {
           soak.leak = what == "descriptor" ? Leak::kDescriptor
                       : what == "memory"   ? Leak::kMemory
                       : what == "name"     ? Leak::kName
                                            : Leak::kData;
         },
         "Do wrong, to see that it is noticed")
      ->check(CLI::IsMember({"descriptor", "memory", "name", "data"}));
}

int run(Options& options) {
  auto run_dir = cli::RunDir::create("");
  if (!run_dir) throw ipc::Exception(run_dir.error());
  SoakOptions& soak = options.soak;
  soak.around.reuse_pids = soak.fleet.reuse_pids;
  soak.at_most = std::chrono::duration_cast<ipc::Duration>(
      std::chrono::duration<double, std::ratio<60>>(options.minutes));
  soak.fleet.instance = "soak";
  soak.fleet.engine = "soak";
  soak.fleet.runtime_dir = run_dir->path();
  soak.fleet.log_dir = options.logs.empty() ? run_dir->logs() : std::filesystem::path(options.logs);
  std::filesystem::create_directories(soak.fleet.log_dir);
  for (std::uint32_t rank = 0; rank < options.ranks; ++rank) {
    soak.fleet.devices.push_back(
        options.device == "host"
            ? fmt::format("host:soak-{}-{}:{}", run_dir->token(), rank, soak.capacity)
            : options.device);
  }
  Seen seen;
  {
    Soak running(soak);
    seen = running.run();
  }
  run_dir->remove_stale_names(soak.fleet.instance);
  seen.left_names = run_dir->leftovers(soak.fleet.instance);
  const std::vector<Figure> figures = judge(soak, seen);
  if (!options.report.empty())
    std::ofstream(options.report) << to_json(soak, seen, figures).dump(1) << "\n";
  cli::Table table({{fmt::format("soak, {} owns, {}", soak.fleet.owner, soak.fleet.handles)},
                    {"seen"},
                    {"limit"},
                    {""}});
  std::string failed;
  for (const Figure& figure : figures) {
    if (!figure.good) failed += fmt::format("FAILED: {}: {}\n", figure.name, figure.seen);
    table.add({figure.name, figure.seen, figure.limit, figure.good ? "ok" : "FAILED"});
  }
  fmt::print("{}", table.render());
  for (const std::string& line : complaints(seen)) fmt::print("WRONG: {}\n", line);
  fmt::print("{}", failed);  // last, where a reader of a log looks first
  return failed.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace kvferry::soak

int main(int argc, char** argv) {
  try {
    // "--serve-trace-reader RUNTIME_DIR INSTANCE": started by a soak, not by people.
    const std::vector<std::string> arguments(argv, argv + argc);
    if (arguments.size() == 4 && arguments[1] == kvferry::soak::kServeTraceReader) {
      return kvferry::soak::serve_trace_reader(arguments[2], arguments[3]);
    }
    kvferry::soak::Options options;
    CLI::App app(
        "Clears and re-inits a cache thousands of times, under traffic, while its processes are "
        "killed and stopped.");
    kvferry::soak::add_options(app, options);
    CLI11_PARSE(app, argc, argv);
    kvferry::soak::enter(options.soak.around, argv);
    kvferry::ipc::init_logging("soak", kvferry::ipc::LogLevel::kError);
    std::signal(SIGPIPE, SIG_IGN);
    const struct Books {
      ~Books() { kvferry::soak::forget_live_heaps(); }
    } books;
    return kvferry::soak::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "soak: {}\n", error.what());
    return EXIT_FAILURE;
  }
}
