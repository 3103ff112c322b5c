// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// A real mover process for tests: mover_child RUNTIME_DIR DEVICE OWNER HANDLES STRATEGY
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "multiproc/worker_setup.hpp"
#include "support/child_side.hpp"

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: mover_child RUNTIME_DIR DEVICE OWNER HANDLES STRATEGY\n");
    return 2;
  }
  kvferry::test::disable_core_dumps();
  try {
    kvferry::ipc::init_logging("mover/0", kvferry::ipc::LogLevel::kInfo);
    kvferry::cache_manager::MoverConfig config;
    config.rank = kvferry::test::rank_config(argv[1], argv[2], argv[3], argv[4]);
    config.strategy = kvferry::cache_manager::parse_copy_strategy(argv[5]).value();
    kvferry::cache_manager::run_mover(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "mover_child: %s\n", error.what());
    return 1;
  }
}
