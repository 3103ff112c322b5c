// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A configuration file, read by the parser of a command with its options: their own readers of
// sizes, times and names included.
#include "fuzz.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "options.hpp"
#include "scratch.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const fuzz::ScratchDir scratch;
  static const std::string file = (scratch.path() / "kvferry.toml").native();
  fuzz::write_file(file, fuzz::Input(data, size).text());
  cli::CommonOptions common;
  std::chrono::milliseconds deadline{1000};
  std::optional<std::uint64_t> memory;
  ipc::CacheOwner owner = ipc::CacheOwner::kWorker;
  std::uint32_t ranks = 1;
  bool skip = false;
  const auto app = cli::make_app("worker", "fuzz", "", common);
  cli::add_milliseconds(*app, "--deadline", deadline, "a time");
  cli::add_size(*app, "--host-memory", memory, "a size");
  cli::add_choice<ipc::CacheOwner>(
      *app, "--cache-owner", owner,
      {{"worker", ipc::CacheOwner::kWorker}, {"mover", ipc::CacheOwner::kMover}}, "a word");
  app->add_option("--ranks", ranks, "a number")->check(CLI::Range(1U, 256U));
  app->add_flag("--skip-bad", skip, "a flag");
  const auto code = cli::parse_arguments(*app, {"--config=" + file});
  KVFERRY_CHECK(!code || *code == cli::kExitUsage || *code == cli::kExitDone, "another exit code");
  KVFERRY_CHECK(deadline.count() > 0 && memory.value_or(1) > 0, "a value out of range");
  KVFERRY_CHECK(ranks >= 1 && ranks <= 256, "a number out of range");
  return 0;
}
