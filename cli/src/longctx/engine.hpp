// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_instance.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "longctx/bound.hpp"
#include "longctx/sequence_model.hpp"
#include "longctx/turn_scheduler.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What one run over all sequences came to.
struct LongctxFigures {
  std::vector<std::uint64_t> checksums;  ///< Of each sequence's outputs.
  double prefill_s = 0;                  ///< Until all contexts are computed, and stored.
  std::uint64_t prefill_stored_bytes = 0;
  std::uint64_t tokens = 0;  ///< That were decoded.
  std::vector<TurnRecord> turns;
  double loading_s = 0;           ///< Of all that: some load was under way.
  std::uint64_t failed_jobs = 0;  ///< Done again.

  /// From the first turn to the end of the last one, without contexts that were computed between.
  [[nodiscard]] double decode_s() const noexcept;
  [[nodiscard]] double waiting_s() const noexcept;
  /// Between turns, and in them.
  [[nodiscard]] std::uint64_t loaded_bytes() const noexcept;
  [[nodiscard]] std::uint64_t streamed_bytes() const noexcept;
  [[nodiscard]] std::uint64_t stored_bytes() const noexcept;
  [[nodiscard]] double tokens_per_s() const noexcept {
    const double seconds = decode_s();
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

/// An engine of long contexts: owns the block tables, has the workers compute over the step
/// channels, and has the movers copy by the handles of its sequences, as its scheduler says. It
/// goes on over the death of a manager: computes meanwhile, copies once the next one is there, and
/// fails only for a block that no device has and that the next one did not find in the pool.
/// @threading the loop's thread. @lifetime the instance outlives it.
class LongctxEngine {
 public:
  struct Options {
    std::string engine;
    ipc::Geometry geometry;
    TurnScheduler::Limits limits;
    std::uint32_t sequences = 0;
    std::uint32_t context = 0;
    std::uint32_t steps = 0;
    std::uint64_t seed = 0;
    std::uint64_t first_handle = 1;
    /// Nothing: all sequences are there at once. Else so many, and the next ones when they have
    /// ended, so that nobody is swapped out.
    std::optional<std::uint32_t> at_a_time;
    std::function<void(const std::string&)> doing;  ///< Told what goes on; may throw.
  };

  LongctxEngine(BenchInstance& instance, const ipc::RuntimeDir& dir, Options options);
  LongctxEngine(const LongctxEngine&) = delete;
  LongctxEngine& operator=(const LongctxEngine&) = delete;
  ~LongctxEngine();

  /// All sequences from their first token to their last. Throws Exception.
  LongctxFigures run();

 private:
  /// The passes of one step, over all ranks: one after the other on each, their outputs add up.
  /// Of a sequence that computes in windows it goes on until all its blocks were read.
  struct Step {
    std::vector<TurnScheduler::Number> members;
    std::vector<std::uint32_t> tokens;  ///< That each computes.
    std::vector<std::uint64_t> outputs;
    std::size_t outstanding = 0;
    bool has_token = false;  ///< In windows: the first pass has written it.
  };

  void await(std::string_view what, const std::function<bool()>& done);
  void let_in();
  void pump();
  /// Whether the device blocks are what they were; fails when they are not.
  [[nodiscard]] bool look_at_contents();
  void take_completions();
  /// Another one serves what it found in the pool of the one before.
  void note_manager();
  void begin_turn();
  void note_turn();
  [[nodiscard]] bool is_settled();
  void submit_jobs();
  [[nodiscard]] ipc::Status submit(const TurnScheduler::Job& job);
  void on_job_ended(const TurnScheduler::Job& job, const BenchTarget::Ended& ended);
  void on_job_failed(const TurnScheduler::Job& job, const ipc::Error& error);
  void start_step();
  /// The next pass of a token in windows, when there is something that it can read.
  void start_window();
  void send_passes(ipc::Decode pass);
  /// Return how many tokens the pass computes of the sequence.
  [[nodiscard]] std::uint32_t add_prefill(TurnScheduler::Number number, ipc::Decode& pass);
  [[nodiscard]] std::uint32_t add_decode(TurnScheduler::Number number,
                                         std::uint32_t place,
                                         ipc::Decode& pass);
  void add_token(TurnScheduler::Number number, ipc::Decode& pass);
  void add_read(TurnScheduler::Number number,
                std::uint32_t index,
                std::uint32_t place,
                ipc::Decode& pass) const;
  void send(ipc::Decode pass);
  void on_reply(const ipc::Result<ipc::DecodeReply>& reply);
  void finish_passes();
  void finish_step();
  void finish_turn();
  void fail(ipc::Error error);
  /// What the next manager says of what it took over; empty when there was only one.
  [[nodiscard]] std::string kept_over_managers();
  void drop_sequences();
  [[nodiscard]] std::uint32_t groups() const noexcept {
    return static_cast<std::uint32_t>(options_.geometry.groups.size());
  }

  BenchInstance& instance_;
  const Options options_;
  std::vector<std::unique_ptr<worker::StepChannel>> channels_;  ///< Of each rank.
  TurnScheduler scheduler_;
  std::vector<SequenceModel> models_;
  std::vector<std::uint64_t> loaded_;  ///< Bytes of each sequence since its last turn.
  std::uint64_t stored_ = 0;           ///< Bytes since the last turn began.
  std::map<std::uint64_t, TurnScheduler::Job> jobs_;  ///< By the number that the client gave.
  std::optional<TurnScheduler::Turn> turn_;
  std::optional<Step> step_;
  std::optional<ipc::TimePoint> stalled_since_;  ///< The step has no pass under way.
  LongctxFigures figures_;
  std::uint32_t arrived_ = 0;
  std::uint32_t loads_ = 0;  ///< Of the jobs.
  ipc::TimePoint loads_since_{};
  bool decoding_ = false;  ///< The turn before was one of decoding.
  ipc::TimePoint started_at_{};
  ipc::TimePoint turn_began_at_{};
  ipc::TimePoint turn_ended_at_{};
  std::uint64_t contents_ = 0;           ///< CacheState::contents that the block tables are of.
  std::vector<worker::ArenaId> arenas_;  ///< Of the same, of each rank.
  std::uint64_t first_manager_ = 0;      ///< ClientStats::reconnects at the begin,
  std::uint64_t manager_ = 0;            ///< and now.
  std::optional<ipc::Error> failed_;
  std::optional<ipc::Error> last_refusal_;  ///< Of a job that is tried again.
  ipc::TimePoint not_before_{};             ///< Jobs are tried again.
  ipc::TimerId retry_timer_ = 0;
};

}  // namespace kvferry::cli
