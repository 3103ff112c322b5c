// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"

namespace kvferry::ipc {

/// Which process of a rank this is, as it was started. Outlived by what it refers to.
struct RankSelf {
  const RankConfig& config;
  ProcessKind kind;
  Device& device;
  TransitionLog transitions;
};

}  // namespace kvferry::ipc
