// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::soak {

struct TrafficOptions {
  worker::ClientOptions client;
  ipc::Geometry geometry;
  std::uint64_t seed = 0;
  bool corrupt_one = false;  ///< Expect wrong data once: shows that it would be noticed.
};

struct TrafficCounts {
  std::uint64_t rounds = 0;  ///< Blocks went out, came back and were verified.
  std::uint64_t interrupted = 0;
  std::uint64_t blocks_out = 0;
  std::uint64_t blocks_in = 0;
  std::uint64_t blocks_verified = 0;
  std::uint64_t blocks_corrupt = 0;
  /// A sequence or block that was stored, and that its manager, alive ever since, did not have.
  std::uint64_t blocks_lost = 0;
  std::uint64_t over_clears =
      0;  ///< Verified blocks that had been stored in an earlier generation.
  std::vector<std::string> wrong;  ///< What may not happen, in words; the first few.
};

/// An engine that never rests: fills blocks, swaps or stores them out, brings others back into
/// other blocks and verifies every word on every rank, while caches are cleared and processes die.
/// @threading a thread of its own; calls from one other thread.
class Traffic {
 public:
  static constexpr std::size_t kMaxStored = 12;  ///< Sequences and prefixes kept in host memory.

  /// Connects. Throws Exception.
  explicit Traffic(TrafficOptions options);
  Traffic(const Traffic&) = delete;
  Traffic& operator=(const Traffic&) = delete;
  ~Traffic();

  /// Waits for the end of a round that has begun after this call. False at the deadline.
  [[nodiscard]] bool wait_round(ipc::Deadline deadline);
  /// Nothing is under way any more when it returns true.
  [[nodiscard]] bool pause(ipc::Deadline deadline);
  void go_on();
  void stop();
  [[nodiscard]] TrafficCounts counts() const;

 private:
  /// What host memory holds of ours, as far as we were told.
  struct Stored {
    std::vector<std::uint64_t> seeds;  ///< One per block.
    std::vector<ipc::Digest> keys;     ///< Empty for a sequence.
    std::uint64_t generation = 0;
    std::uint64_t reconnects = 0;  ///< Another count: another manager, or it may be.
  };

  void run();
  [[nodiscard]] ipc::Status round();
  [[nodiscard]] ipc::Status store(std::uint64_t name, std::span<const ipc::BlockId> blocks);
  [[nodiscard]] ipc::Status load(std::uint64_t name, std::span<const ipc::BlockId> blocks);
  [[nodiscard]] ipc::Status run_step(std::span<const ipc::BlockId> blocks,
                                     std::span<const std::uint64_t> seeds,
                                     bool verify);
  [[nodiscard]] ipc::Result<worker::Completion> finish(ipc::JobId job);
  [[nodiscard]] std::vector<ipc::BlockId> pick_blocks(std::size_t count);
  [[nodiscard]] ipc::Status drop(std::uint64_t name);
  [[nodiscard]] ipc::Status check_generation();
  void tell_wrong(std::string what);

  TrafficOptions options_;
  std::mt19937_64 random_;
  ipc::EventLoop loop_;
  std::unique_ptr<worker::Client> client_;
  std::vector<std::unique_ptr<worker::StepChannel>> channels_;
  std::map<std::uint64_t, Stored> stored_;
  std::vector<std::uint64_t> to_drop_;  ///< Sequences that a lost manager may not have dropped.
  std::uint64_t next_name_ = 1;
  std::uint64_t device_blocks_ = 0;
  std::uint64_t generation_ = 0;  ///< Of the round.
  std::vector<worker::ArenaId> arenas_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  TrafficCounts counts_;
  std::uint64_t begun_ = 0;      ///< Rounds.
  std::uint64_t completed_ = 0;  ///< The latest round that was good, by its number.
  bool pause_wanted_ = false;
  bool paused_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace kvferry::soak
