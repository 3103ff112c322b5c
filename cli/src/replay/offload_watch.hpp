// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvferry::cli {

/// Notices what a replay would otherwise go on without: that blocks can no longer be moved, or not
/// yet. Says so with what the processes give as the reason, and says when the run is to end for it.
/// Times are the caller's, so that a minute needs none.
/// @threading one thread.
class OffloadWatch {
 public:
  struct Options {
    ipc::Duration start_limit;  ///< From the first update until offload is ready.
    ipc::Duration patience;     ///< Without offload, and without a death that explains it.
  };
  /// What an engine sees now.
  struct Sight {
    bool playing = false;        ///< Was ready for everything once.
    bool cache_ready = false;    ///< Steps can run: no clear, no re-init, no lost worker.
    bool offload_ready = false;  ///< Jobs are accepted.
    std::uint64_t deaths = 0;    ///< Of processes of the run, so far.
  };
  struct Hooks {
    std::function<void(const std::string& line)> say;
    /// Why offload is not ready, in words, as the processes themselves tell it.
    std::function<std::string()> reasons;
  };

  OffloadWatch(Options options, Hooks hooks) : options_(options), hooks_(std::move(hooks)) {}

  /// To be called whenever the state may have changed, and about every second. An error: the run is
  /// over.
  [[nodiscard]] ipc::Status update(const Sight& sight, ipc::TimePoint now);
  /// Seconds of playing with a usable cache and without offload.
  [[nodiscard]] double down_s() const noexcept { return down_s_; }

 private:
  [[nodiscard]] ipc::Status wait_for_start(ipc::TimePoint now);
  [[nodiscard]] ipc::Status go_without(const Sight& sight, ipc::TimePoint now);

  const Options options_;
  const Hooks hooks_;
  std::optional<ipc::TimePoint> first_;       ///< Update ever.
  std::optional<ipc::TimePoint> down_since_;  ///< Without offload.
  ipc::TimePoint counted_to_{};               ///< down_s_ is complete up to here.
  ipc::TimePoint explained_at_{};  ///< Start of the patience: the loss, or a death after it.
  ipc::TimePoint said_at_{};
  std::uint64_t deaths_ = 0;
  bool said_ = false;
  double down_s_ = 0;
};

}  // namespace kvferry::cli
