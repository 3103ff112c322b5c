// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "print.hpp"

#include <algorithm>
#include <array>

namespace kvferry::cli {
namespace {

constexpr std::string_view kVersion = KVFERRY_VERSION;

constexpr std::array kCommands = {
    Command{"replay", "play a trace of requests through real processes, and check every byte",
            replay_command},
    Command{"rl-loop", "run rollouts, pauses and weight updates in a loop, and check every answer",
            rl_loop_command},
    Command{"longctx", "decode sequences that do not fit the device together, in turns",
            longctx_command},
    Command{"simulate", "play a trace through caches without data: hits by policy and capacity",
            simulate_command},
    Command{"bench", "measure transfers against the link and against others' ways to copy",
            bench_command},
    Command{"calibrate", "measure what copies cost on this machine, and show what is chosen",
            calibrate_command},
    Command{"manager", "run the manager: host memory, prefix index, control (one per host)",
            manager_command},
    Command{"mover", "run the mover of one rank: copies blocks between device and host",
            mover_command},
    Command{"worker", "run the reference worker of one rank: holds the device's KV arena",
            worker_command},
    Command{"status", "show what a running manager sees", status_command},
    Command{"events", "show what a manager's host memory stores and removes", events_command},
    Command{"pause", "stop an engine's requests: abort, retract or keep them in place",
            pause_command},
    Command{"continue", "let a paused engine run again; its allocators give memory back",
            continue_command},
    Command{"flush", "forget what an idle engine's cache holds", flush_command},
    Command{"update-weights", "give an engine's workers new weights", update_weights_command},
    Command{"export-weights", "lend weights in device memory to an engine's workers",
            export_weights_command},
    Command{"release", "give an idle engine's cache, weights and scratch memory back to the driver",
            release_command},
    Command{"resume", "take released memory again", resume_command},
    Command{"components", "show what workers have on the device beside the cache, and release it",
            components_command},
    Command{"clear", "give the device memory of the KV cache back to the driver", clear_command},
    Command{"reinit", "allocate the KV cache again after a clear", reinit_command},
    Command{"gc", "remove what killed processes have left behind, host pools included", gc_command},
    Command{"trace", "show what processes did in the handshake, and check it", trace_command}};
/// What kvferry starts itself, and nobody else has a use for.
constexpr std::array kHiddenCommands = {
    Command{"bench-copier", "a worker that copies by itself", bench_copier_command}};
static_assert(std::equal(kCommands.begin(),
                         kCommands.end(),
                         kCommandNames.begin(),
                         kCommandNames.end(),
                         [](const Command& command, std::string_view name) {
                           return command.name == name;
                         }));

void print_help() {
  print_out(
      "kvferry moves KV-cache blocks of LLM serving between device memory and host memory,\n"
      "in processes of its own.\n\n"
      "usage: kvferry COMMAND [OPTIONS]\n\n"
      "commands:\n");
  for (const Command& command : kCommands) {
    print_out("  {:<14} {}\n", command.name, command.summary);
  }
  print_out(
      "\nStart here (no GPU needed, takes about a minute):\n"
      "  kvferry replay --device host\n\n"
      "'kvferry COMMAND --help' explains a command. Options can also be given as environment\n"
      "variables (KVFERRY_GPU_BLOCKS for --gpu-blocks) or in a TOML file (--config FILE).\n\n"
      "exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no manager there,\n"
      "            4 done, with memory quarantined, 5 a daemon cannot run as it was started\n");
}

const Command* find_command(std::string_view name) {
  for (const Command& command : kCommands) {
    if (command.name == name) return &command;
  }
  for (const Command& command : kHiddenCommands) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

}  // namespace

std::span<const Command> commands() { return kCommands; }

int run_program(std::string_view program, Arguments arguments) {
  const std::string_view base = program.substr(program.rfind('/') + 1);
  constexpr std::string_view kPrefix = "kvferry-";
  if (base.starts_with(kPrefix)) {
    if (const Command* command = find_command(base.substr(kPrefix.size()))) {
      return command->run(arguments);
    }
  }
  if (arguments.empty()) {
    print_help();
    return kExitUsage;
  }
  std::string first = arguments.front();
  arguments.erase(arguments.begin());
  if (first == "--version") {
    print_out("kvferry {}\n", kVersion);
    return kExitDone;
  }
  const bool wants_help = first == "--help" || first == "-h" || first == "help";
  if (wants_help && arguments.empty()) {
    print_help();
    return kExitDone;
  }
  if (wants_help) {
    first = arguments.front();
    arguments = {"--help"};
  }
  if (const Command* command = find_command(first)) return command->run(arguments);
  print_err("kvferry: there is no command '{}'; 'kvferry --help' lists them\n", first);
  return kExitUsage;
}

}  // namespace kvferry::cli
