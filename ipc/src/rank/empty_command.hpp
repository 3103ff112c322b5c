// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "rank/emptying_user.hpp"
#include "rank/lifecycle_commands.hpp"

namespace kvferry::ipc {

/// The emptying of the allocator, as the manager commands it. @threading one at a time.
class EmptyCommand {
 public:
  EmptyCommand(const EmptyingUser& user, Device& device) : user_(user), device_(device) {}

  [[nodiscard]] static bool is_command(const Envelope& envelope) noexcept {
    return !envelope.is_reply && envelope.kind == MessageKind::kRankEmpty;
  }
  /// Carries it out, to its end.
  [[nodiscard]] LifecycleCommands::Answer run(const Envelope& request);

 private:
  const EmptyingUser& user_;
  Device& device_;
};

}  // namespace kvferry::ipc
