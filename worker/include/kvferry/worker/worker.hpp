// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/rank_config.hpp"

namespace kvferry::worker {

struct WorkerConfig {
  ipc::RankConfig rank;
};

/// Runs the reference worker of one rank until SIGTERM or SIGINT: arena, staging agent, runner.
/// Throws Exception when it cannot be set up.
void run_worker(const WorkerConfig& config);

}  // namespace kvferry::worker
