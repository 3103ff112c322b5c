// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// What every command of kvferry exits with.
enum ExitCode : int {
  kExitDone = 0,
  kExitFailed = 1,       ///< Refused or failed; why is on stderr.
  kExitUsage = 2,        ///< An option, environment variable or configuration file is wrong.
  kExitNoManager = 3,    ///< No manager answers on the instance.
  kExitQuarantined = 4,  ///< Done, but some memory waits for a peer that still holds it.
  kExitCannotRun = 5,    ///< A daemon that starting again with the same options does not mend.
};

using Arguments = std::vector<std::string>;

struct Command {
  std::string_view name;
  std::string_view summary;
  int (*run)(const Arguments& arguments);
};

/// The subcommands in the order of the help text.
inline constexpr auto kCommandNames = std::to_array<std::string_view>(
    {"replay",         "rl-loop", "longctx",  "simulate",   "bench",
     "calibrate",      "manager", "mover",    "worker",     "status",
     "events",         "pause",   "continue", "flush",      "update-weights",
     "export-weights", "release", "resume",   "components", "clear",
     "reinit",         "gc",      "trace"});

/// All of them, in the same order.
[[nodiscard]] std::span<const Command> commands();

int manager_command(const Arguments& arguments);
int mover_command(const Arguments& arguments);
int worker_command(const Arguments& arguments);
int status_command(const Arguments& arguments);
int events_command(const Arguments& arguments);
int pause_command(const Arguments& arguments);
int continue_command(const Arguments& arguments);
int flush_command(const Arguments& arguments);
int update_weights_command(const Arguments& arguments);
int export_weights_command(const Arguments& arguments);
int release_command(const Arguments& arguments);
int resume_command(const Arguments& arguments);
int components_command(const Arguments& arguments);
int clear_command(const Arguments& arguments);
int reinit_command(const Arguments& arguments);
int gc_command(const Arguments& arguments);
int trace_command(const Arguments& arguments);
int replay_command(const Arguments& arguments);
int rl_loop_command(const Arguments& arguments);
int longctx_command(const Arguments& arguments);
int simulate_command(const Arguments& arguments);
int bench_command(const Arguments& arguments);
int bench_copier_command(const Arguments& arguments);
int calibrate_command(const Arguments& arguments);

/// Picks the command by the program's name ("kvferry-mover") or the first argument.
int run_program(std::string_view program, Arguments arguments);

}  // namespace kvferry::cli
