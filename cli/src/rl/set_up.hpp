// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "rl/prompts.hpp"
#include "rl/report.hpp"
#include "rl/rl_loop.hpp"
#include "rl/weights_files.hpp"
#include "run/children.hpp"
#include "run/leak_check.hpp"
#include "run/run_dir.hpp"

#include <string>
#include <vector>

namespace kvferry::cli {

/// What an RL loop decided and prepared before its first process.
struct RlSetUp {
  PromptSet prompts;
  InstancePlan plan;
  std::vector<WeightsVersion> weights;
  DeviceProbe devices;  ///< Looked at before anything runs on them.
  RlSettings settings;
};

/// Writes the weights into the run's directory and decides sizes that suit the prompts and the
/// machine. Throws Exception when it cannot be done.
[[nodiscard]] RlSetUp set_up_rl_loop(const RlConfig& config, const RunDir& dir);

/// What is about to run, and where to look at it.
[[nodiscard]] std::string rl_heading(const RlConfig& config,
                                     const RlSetUp& set_up,
                                     const RunDir& dir);

}  // namespace kvferry::cli
