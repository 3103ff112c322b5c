// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace kvferry::cache_manager {

struct ManagerConfig {
  std::string runtime_dir;  ///< Empty: the default.
  std::string instance = "default";
  std::uint64_t pool_bytes = 1ULL << 30;     ///< Host memory for blocks, all engines together.
  std::uint32_t max_jobs_per_engine = 1024;  ///< Beyond it submits are kBusy.
  /// A job that could not be started for so long ends as kTimeout.
  std::chrono::milliseconds queue_deadline{60'000};
  /// A mover that answers nothing for so long has its jobs cancelled (kTimeout); one that then does
  /// not even give them up is ended after as long again.
  std::chrono::milliseconds job_deadline{30'000};
};

/// Runs the manager until SIGTERM, SIGINT or SIGHUP. Throws Exception when it cannot be set up
/// (kAlreadyExists: a second manager on the instance; kNoHostMemory: the pool does not fit).
void run_manager(const ManagerConfig& config);

}  // namespace kvferry::cache_manager
