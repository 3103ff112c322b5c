// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// A real worker process for tests: worker_child RUNTIME_DIR DEVICE OWNER HANDLES
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/worker.hpp"
#include "multiproc/worker_setup.hpp"

#include <cstdio>
#include <exception>
#include <string>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: worker_child RUNTIME_DIR DEVICE OWNER HANDLES\n");
    return 2;
  }
  try {
    kvferry::ipc::init_logging("worker/0", kvferry::ipc::LogLevel::kInfo);
    kvferry::worker::WorkerConfig config;
    config.rank = kvferry::test::rank_config(argv[1], argv[2], argv[3], argv[4]);
    kvferry::worker::run_worker(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "worker_child: %s\n", error.what());
    return 1;
  }
}
