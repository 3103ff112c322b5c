// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "run/leak_check.hpp"
#include "soak/fleet.hpp"
#include "soak/keeper.hpp"
#include "soak/observer.hpp"
#include "soak/surroundings.hpp"
#include "soak/trace_reader.hpp"
#include "soak/traffic.hpp"

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace kvferry::soak {

/// A fault of the soak itself, to see that its judge fails.
enum class Leak : std::uint8_t { kNone, kDescriptor, kMemory, kName, kData };

struct SoakOptions {
  std::uint64_t cycles = 10'000;
  ipc::Duration at_most{};  ///< 0: as long as it takes.
  std::uint64_t seed = 1;
  double kill_share = 0.05;  ///< Of cycles that somebody is killed in.
  double stop_share = 0.02;  ///< Of cycles that somebody is stopped in.
  std::uint64_t look_every = 10;
  Leak leak = Leak::kNone;
  FleetOptions fleet;
  Surroundings around;
  std::uint64_t capacity = 64ULL << 20;  ///< Of each host device.
};

struct Cycle {
  double clear_ms = 0;
  double reinit_ms = 0;
  double whole_ms = 0;    ///< Until blocks went out, came back and were verified again.
  double stopped_ms = 0;  ///< How long somebody was stopped: nobody's fault.
  bool struck = false;
  bool quarantined = false;
};

/// The numbers of one look.
struct Sample {
  static constexpr std::size_t kMaxProcesses = 20;
  struct Process {
    std::uint64_t life = 0;  ///< 0: was not there.
    std::uint64_t descriptors = 0;
    std::uint64_t private_bytes = 0;
    std::uint64_t resident_bytes = 0;
    std::uint64_t heap_bytes = 0;
  };
  std::uint64_t cycle = 0;
  std::uint64_t driver_used = 0;
  std::uint64_t rings = 0;
  std::array<Process, kMaxProcesses> processes;  ///< In the order of Seen::names.
};

/// What a run has seen; judged by report.hpp.
struct Seen {
  std::vector<Cycle> cycles;
  std::vector<std::string> names;  ///< Of the processes.
  std::optional<Look> first;       ///< What all later looks are compared with.
  std::vector<Sample> samples;
  std::vector<std::string> changes;  ///< What is not as it was at first, each with its cycle.
  std::vector<double> back_ms;       ///< After an owner's SIGKILL: until its memory was back.
  TraceCounts trace;
  TrafficCounts traffic;
  std::uint64_t kills = 0;
  std::uint64_t stops = 0;
  std::uint64_t ended_by_owner = 0;
  std::vector<UnexpectedDeath> deaths;
  std::vector<std::string> wrong;  ///< Whatever else may not happen.
  std::uint64_t used_in_the_end = 0;
  std::vector<std::string> left_names;
  SurroundingsDone around;
  double seconds = 0;
};

/// Clears and re-inits one cache again and again, under traffic, and strikes its processes.
class Soak {
 public:
  /// Starts everything. Throws Exception.
  explicit Soak(SoakOptions options);
  ~Soak();
  [[nodiscard]] const SoakOptions& options() const noexcept { return options_; }
  /// All cycles, then the end of all processes.
  [[nodiscard]] Seen run();

 private:
  void run_cycle(std::uint64_t number);
  void fork_child();
  [[nodiscard]] std::vector<Blow> plan_blows(std::uint64_t number);
  [[nodiscard]] ipc::Status clear(Cycle& cycle);
  [[nodiscard]] ipc::Status reinit();
  [[nodiscard]] ipc::Status wait_for_news(ipc::Deadline deadline);
  void look(std::uint64_t number);
  void keep(std::uint64_t number, const Look& look);
  [[nodiscard]] Look look_once();
  [[nodiscard]] std::vector<std::string> still_open();
  void leak(std::uint64_t number);
  void watch_memory_return();

  SoakOptions options_;
  std::mt19937_64 random_;
  Seen seen_;
  std::optional<ipc::RuntimeDir> dir_;
  cli::DeviceProbe probe_;
  std::unique_ptr<Fleet> fleet_;
  std::unique_ptr<Keeper> keeper_;
  std::unique_ptr<worker::Client> client_;
  Children children_;
  std::unique_ptr<Traffic> traffic_;
  std::unique_ptr<TraceReader> trace_;
  double usual_cycle_ms_ = 30;
  std::size_t cycle_count_ = 0;
  std::size_t sample_count_ = 0;
  bool aborted_ = false;
  std::vector<std::unique_ptr<std::vector<char>>> leaked_;
};

}  // namespace kvferry::soak
