// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "rank/weights_upload.hpp"
#include "rank/weights_whole.hpp"

#include <atomic>
#include <cstdint>
#include <mutex>

namespace kvferry::ipc {

/// What the manager orders about a worker's weights, and which ones are in use.
/// @threading run(): the weights' thread; others: any.
class WeightsCommands {
 public:
  /// user: null for a process without weights. dir: where those who lend weights are found; it
  /// outlives this.
  WeightsCommands(WeightsUser* user, const Digest& initial, const RuntimeDir& dir, Rank rank)
      : user_(user), dir_(dir), rank_(rank), id_(initial) {}

  [[nodiscard]] static bool is_command(const Envelope& envelope) noexcept {
    return !envelope.is_reply && (envelope.kind == MessageKind::kRankWeights ||
                                  envelope.kind == MessageKind::kRankWeightsPart ||
                                  envelope.kind == MessageKind::kRankWeightsRead ||
                                  envelope.kind == MessageKind::kRankBroadcast);
  }
  /// The identity of the weights in use; zero when there are none.
  [[nodiscard]] Digest id() const;
  /// They are gone, without a backup: until the next commit.
  void lose() { lost_.store(true); }
  [[nodiscard]] bool lost() const noexcept { return lost_.load(); }
  /// A command that is about to be posted may end the one that runs.
  void interrupt(const Envelope& request) noexcept;
  void cancel() noexcept;
  /// The manager is gone: nobody goes on with what it, or its clients, had begun. The weights'
  /// thread; cancel() before lets a prepare end soon.
  void abandon();
  /// Carries a command out, to its end.
  [[nodiscard]] Envelope run(const Envelope& request);

 private:
  [[nodiscard]] Status answer(const Envelope& request, Envelope& reply);
  [[nodiscard]] Status answer_safely(const Envelope& request, Envelope& reply);
  [[nodiscard]] Status check_user() const;
  [[nodiscard]] Status take_part(const Envelope& request);
  [[nodiscard]] Result<WeightsPart> read_part(const Envelope& request);
  [[nodiscard]] Result<RankBroadcastReply> look_or_open(const Envelope& request);
  [[nodiscard]] Result<std::uint64_t> prepare(const RankWeights& order);
  [[nodiscard]] Result<WeightsSource> locate(const WeightsSource& ordered) const;
  void forget_images();
  [[nodiscard]] Result<RankWeightsReply> obey(const Envelope& request);
  void set_id(const Digest& id);

  WeightsUser* const user_;
  const RuntimeDir& dir_;
  const Rank rank_;
  WeightsUpload upload_;
  WeightsWhole whole_;
  std::atomic<bool> lost_{false};
  std::uint64_t prepared_ = 0;  ///< Number of the update that is prepared; 0 for none.
  mutable std::mutex mutex_;    ///< Guards what follows.
  Digest id_;
};

}  // namespace kvferry::ipc
