// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "rank/emptying_user.hpp"
#include "rank/lifecycle_commands.hpp"
#include "rank/weights_commands.hpp"

#include <mutex>

namespace kvferry::ipc {

/// Releases and resumes of a worker's memory beside the arena, as the manager commands them.
/// @threading run(): the thread of the weights; released(): any.
class MemoryCommands {
 public:
  /// user: null for a process that releases nothing but the arena.
  MemoryCommands(MemoryUser* user,
                 const EmptyingUser& allocator,
                 WeightsCommands& weights,
                 Device& device)
      : user_(user), allocator_(allocator), weights_(weights), device_(device) {}

  [[nodiscard]] static bool is_command(const Envelope& envelope) noexcept {
    return !envelope.is_reply && (envelope.kind == MessageKind::kRankRelease ||
                                  envelope.kind == MessageKind::kRankResume);
  }
  /// Of kWeights and kScratch.
  [[nodiscard]] MemoryTags released() const;
  /// Carries a command out, to its end.
  [[nodiscard]] LifecycleCommands::Answer run(const Envelope& request);

 private:
  [[nodiscard]] Result<RankReleaseReply> release(const Envelope& request);
  [[nodiscard]] Result<RankReleaseReply> resume(const Envelope& request);
  [[nodiscard]] Status check(MemoryTags tags) const;
  /// What a release backs up: nothing of what is lost.
  [[nodiscard]] WeightsBackup backup_of(MemoryTag tag, WeightsBackup wanted) const;
  void set_released(MemoryTags tags);

  MemoryUser* const user_;
  const EmptyingUser& allocator_;
  WeightsCommands& weights_;
  Device& device_;
  mutable std::mutex mutex_;  ///< Guards what follows.
  MemoryTags released_;
};

}  // namespace kvferry::ipc
