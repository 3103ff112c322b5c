// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "rank/emptying_user.hpp"
#include "rank/rank_lease.hpp"

#include <optional>

namespace kvferry::ipc {

/// The one clear and the one re-init, as the manager commands them. They wait for peers.
/// @threading the lifecycle thread.
class LifecycleCommands {
 public:
  struct Answer {
    Envelope reply;
    std::optional<MemoryInfo> memory;  ///< Seen after the allocator gave back its part.
  };

  LifecycleCommands(RankLease& lease, EmptyingUser& user, Device& device)
      : lease_(lease), user_(user), device_(device) {}

  [[nodiscard]] static bool is_command(const Envelope& envelope) noexcept;
  /// Carries a command out, to its end.
  [[nodiscard]] Answer run(const Envelope& request);

 private:
  [[nodiscard]] Result<RankClearReply> clear(const Envelope& request,
                                             std::optional<MemoryInfo>& memory);
  [[nodiscard]] Result<RankReinitReply> reinit(const Envelope& request);

  RankLease& lease_;
  EmptyingUser& user_;
  Device& device_;
};

}  // namespace kvferry::ipc
