// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A real manager in a process of its own: manager_child RUNTIME_DIR JOB_DEADLINE_MS MAX_JOBS
// [POOL_BYTES [VERIFY_LOADS [LATE_SUMS_DEADLINE_MS]]].
#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  if (argc < 4 || argc > 7) return 2;
  kvferry::ipc::init_logging("manager", kvferry::ipc::LogLevel::kDebug);
  kvferry::cache_manager::ManagerConfig config;
  config.runtime_dir = argv[1];
  config.pool_bytes = argc >= 5 ? std::stoull(argv[4]) : 4ULL << 20U;
  config.job_deadline = std::chrono::milliseconds(std::stol(argv[2]));
  config.max_jobs_per_engine = static_cast<std::uint32_t>(std::stoul(argv[3]));
  if (argc >= 6 && std::string(argv[5]) == "always") {
    config.verify_loads = kvferry::cache_manager::VerifyLoads::kAlways;
  }
  if (argc >= 7) config.late_sums_deadline = std::chrono::milliseconds(std::stol(argv[6]));
  try {
    kvferry::cache_manager::run_manager(config);
  } catch (const kvferry::ipc::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
