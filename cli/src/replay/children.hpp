// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "replay/replay.hpp"
#include "replay/sizing.hpp"
#include "replay/supervisor.hpp"

#include <filesystem>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// The name under which a replay's workers, movers and engine find each other.
inline constexpr std::string_view kReplayEngine = "replay";

/// What a replay decided before its first child.
struct ReplayPlan {
  Sizing sizing;
  ipc::ArenaOptions arena;
  std::vector<ipc::DeviceSpec> devices;  ///< Of each rank.
};

/// A replay's processes with their command lines, in the order in which they are started.
[[nodiscard]] std::vector<ChildSpec> replay_children(const ReplayConfig& config,
                                                     const ReplayPlan& plan,
                                                     const std::filesystem::path& runtime_dir);

}  // namespace kvferry::cli
