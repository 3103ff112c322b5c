// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace kvferry::cli {

/// Lets sequences whose blocks exceed the device take turns on it, and says which blocks go where
/// and when. It does nothing itself: its caller computes, and has the jobs done.
///
/// Sequences wait in one order. A turn takes as many from its front as TurnLimits::active_blocks
/// hold, which then compute for a slice and go to the back. Meanwhile, with look-ahead, blocks of
/// the next turn are loaded into what is free, in the order in which they are needed; what is
/// needed last gives its blocks up for them. What a sequence has finished writing is stored in the
/// background, once: a block that was not written since needs no copy to be given up.
///
/// A sequence of which the device does not hold all blocks has a turn of its own, in windows: each
/// token is computed in passes over those blocks that are there and were not read for it yet, and
/// every block gives its place up, once it was read, to one that was not. So a token loads no more
/// than what the device does not hold: a block that stays for the next token is read first then.
/// The order of passes is any: what they compute adds up, as parts of attention do. (Where each
/// layer needs the one before of the whole sequence, every layer is a group, and has its passes.)
///
/// Nobody waits in a circle, because everything is taken in one order, and what comes late is never
/// held for what comes early:
///   1. host memory for the whole life of a sequence, when it arrives: so every store finds room;
///   2. device blocks, for the front of the order first, all that its turn will need: so a turn
///      that has begun waits for nobody, and ends. A turn in windows has all that it writes, and
///      at least one that it reads in: it waits for its own loads, which end (3);
///   3. a job, which names blocks that its sequence has on both sides: so every job ends.
/// The front of the order gets its blocks from those behind it, which hold nothing but blocks that
/// can be stored (1), and from the turn before, which ends (2).
///
/// Pure: no clock, no memory but its own. @threading one thread.
class TurnScheduler {
 public:
  using Number = std::uint32_t;
  using JobId = std::uint64_t;

  struct Limits {
    std::uint32_t device_blocks = 0;
    std::uint64_t host_blocks = 0;
    std::uint32_t active_blocks = 0;  ///< Of one turn; a sequence that needs more has its own.
    std::uint32_t active_sequences = 64;
    std::uint32_t tokens_per_block = 1;
    std::uint32_t slice = 1;       ///< Tokens that a sequence computes in its turn.
    std::uint32_t job_blocks = 1;  ///< Of one job, at most.
    /// Of the first pass of a token in windows; later ones have up to a quarter of the device's.
    std::uint32_t window_blocks = 1;
    std::uint32_t jobs_each_way = 1;
    bool look_ahead = true;  ///< Else blocks are loaded only while nobody has a turn.
  };

  struct Turn {
    /// The keys and values of the context are to be computed: its sequences are new.
    bool is_prefill = false;
    std::vector<Number> members;
  };
  enum class Way : std::uint8_t { kStore = 1, kLoad };
  struct Place {
    std::uint32_t index = 0;  ///< In its sequence.
    std::uint32_t block = 0;  ///< Of the device.
  };
  struct Job {
    JobId id = 0;
    Way way = Way::kStore;
    Number sequence = 0;
    std::vector<Place> places;
  };

  explicit TurnScheduler(const Limits& limits);

  /// A new sequence of so many tokens that will compute so many more. kInvalidArgument: it is too
  /// long, or larger than the device, which has less than kLeastForWindows blocks; kNoHostMemory:
  /// host memory does not hold it beside the others.
  [[nodiscard]] ipc::Status arrive(Number number, std::uint32_t context, std::uint32_t steps);
  /// The sequence is of no more use, whatever of it was computed. @pre it has no turn
  void leave(Number number);

  /// What the next turn would be, whether it can begin yet or not; no members: all have ended.
  [[nodiscard]] Turn next_turn() const;
  /// Begins it when all its blocks are there. @pre no turn is under way
  [[nodiscard]] std::optional<Turn> begin_turn();
  /// A member has computed so many tokens more. @pre not more than to_compute()
  void computed(Number number, std::uint32_t tokens);
  /// Of the turn that is under way, or else of the next one: tokens that it is to compute still.
  [[nodiscard]] std::uint32_t to_compute(Number number) const;
  /// Whatever its members have computed by now. One that has computed all ends.
  void end_turn();
  [[nodiscard]] bool has_turn() const noexcept { return turn_.has_value(); }

  /// The turn that is under way decodes in windows: its only member computes one token after the
  /// other, each when all its blocks were read.
  [[nodiscard]] bool in_windows() const noexcept { return windows_.has_value(); }
  /// What the next pass for the token reads: blocks of the sequence, of which the one that the
  /// token is written to is one. Nothing: is_read(), or more has to be loaded first.
  /// @pre in_windows(), no pass is under way
  [[nodiscard]] std::vector<std::uint32_t> begin_window();
  /// The pass has ended: blocks that it read may go.
  void end_window();
  /// All blocks were read for the token. @pre in_windows()
  [[nodiscard]] bool is_read() const { return windows_.value().left == 0; }

  /// What is to be copied next, if anything is and may be. The caller says how it ended.
  [[nodiscard]] std::optional<Job> next_job();
  /// One that failed has changed nothing; it comes again.
  void job_ended(JobId id, bool done);
  [[nodiscard]] std::size_t jobs() const noexcept { return jobs_.size(); }
  /// Host memory may have lost any of what it has: blocks that the device has, too, are stored
  /// again before they are given up. Those that only host memory has are loaded from there.
  void doubt_host();

  [[nodiscard]] std::uint32_t device_block(Number number, std::uint32_t index) const;
  [[nodiscard]] std::uint32_t tokens(Number number) const { return sequences_.at(number).tokens; }
  /// It has neither ended nor left.
  [[nodiscard]] bool is_present(Number number) const;
  /// Sequences that have neither ended nor left, and those whose jobs have not ended.
  [[nodiscard]] std::size_t sequences() const noexcept { return sequences_.size(); }
  [[nodiscard]] std::size_t free_blocks() const noexcept { return free_.size(); }
  [[nodiscard]] std::uint64_t host_reserved() const noexcept { return host_reserved_; }
  /// Aborts when a block has two owners or none, or a count is wrong. For tests.
  void check() const;

  /// One that is written, and one that the others are read in.
  static constexpr std::uint32_t kLeastForWindows = 2;
  /// Device blocks for so many tokens.
  [[nodiscard]] static std::uint32_t blocks_of(std::uint32_t tokens,
                                               std::uint32_t tokens_per_block) noexcept;
  /// Host blocks that a sequence of so many blocks needs: one that was written again is stored
  /// beside what is there of it.
  [[nodiscard]] static std::uint64_t host_blocks_of(std::uint32_t blocks) noexcept {
    return std::uint64_t{blocks} + 1;
  }

 private:
  enum class Where : std::uint8_t {
    kAway = 1,    ///< No device block.
    kAwaitsLoad,  ///< Has one, of which the contents are not there yet.
    kLoading,
    kHere
  };
  /// kWholeBlocks: those that are never written again.
  enum class Part : std::uint8_t { kAll = 1, kWholeBlocks };
  struct Block {
    Where where = Where::kAway;
    bool on_host = false;  ///< With the same contents.
    bool storing = false;
    bool was_stored = false;  ///< A store replaces what host memory may have of it.
    std::uint32_t device = 0;
  };
  /// Below its mark no block is of a kind: where a search begins.
  struct Marks {
    std::uint32_t away = 0;
    std::uint32_t not_here = 0;
    std::uint32_t unstored = 0;
  };
  struct Sequence {
    std::uint32_t context = 0;
    std::uint32_t most_tokens = 0;
    std::uint32_t tokens = 0;    ///< Whose keys and values were computed.
    std::uint32_t turn_end = 0;  ///< Tokens by the end of its turn.
    std::vector<Block> blocks;
    Marks marks;
    std::uint32_t evict_end = 0;  ///< No block from here on can be given up.
    std::uint32_t awaiting = 0;   ///< Blocks that await their load.
    std::uint32_t jobs = 0;
    bool replacing = false;  ///< One of its jobs stores a block that was_stored.
    bool in_turn = false;
    bool over = false;
  };
  /// Of a token that is computed in windows: its blocks, by their index, each in one of these
  /// or being loaded.
  struct Windows {
    Number number = 0;
    std::uint32_t first_written = 0;   ///< From here on they stay until the turn ends.
    std::uint32_t left = 0;            ///< Not read yet, wherever they are.
    std::deque<std::uint32_t> unread;  ///< On the device.
    std::vector<std::uint32_t> reading;
    std::deque<std::uint32_t> read;      ///< On the device still; the first one goes first.
    std::deque<std::uint32_t> away;      ///< Not read, without a device block.
    std::deque<std::uint32_t> awaiting;  ///< Not read, with one.
    std::uint32_t loading = 0;
  };

  [[nodiscard]] std::uint32_t blocks_of(std::uint32_t tokens) const noexcept {
    return blocks_of(tokens, limits_.tokens_per_block);
  }
  [[nodiscard]] std::uint32_t turn_end(const Sequence& sequence) const noexcept;
  /// The device never holds all that it needs in its turn.
  [[nodiscard]] bool needs_windows(const Sequence& sequence) const noexcept {
    return turn_blocks(sequence) > limits_.device_blocks;
  }
  /// The first block that it has to have when its turn begins; from there on it has to have all.
  [[nodiscard]] std::uint32_t first_needed(const Sequence& sequence) const noexcept {
    return needs_windows(sequence) ? first_written(sequence) : 0;
  }
  [[nodiscard]] std::uint32_t first_written(const Sequence& sequence) const noexcept {
    return sequence.tokens / limits_.tokens_per_block;
  }
  [[nodiscard]] std::uint32_t turn_blocks(const Sequence& sequence) const noexcept {
    return blocks_of(turn_end(sequence));
  }
  /// In which blocks get to the device.
  [[nodiscard]] std::vector<Number> order() const;
  [[nodiscard]] bool is_complete(const Sequence& sequence) const;
  [[nodiscard]] bool is_oversubscribed() const noexcept {
    return most_blocks_ > limits_.device_blocks;
  }

  void give_blocks();
  [[nodiscard]] bool give_blocks_to(Sequence& sequence,
                                    const std::vector<Number>& order,
                                    std::size_t first_victim);
  /// Those from its first_needed() on.
  [[nodiscard]] bool give_needed_blocks(Sequence& sequence,
                                        const std::vector<Number>& order,
                                        std::size_t first_victim);
  /// @pre a block is free
  void take_free_block(Sequence& sequence, std::uint32_t index);
  [[nodiscard]] bool evict_one(const std::vector<Number>& order, std::size_t first_victim);
  [[nodiscard]] bool evict_from(Sequence& sequence);
  [[nodiscard]] bool evict_below(Sequence& sequence, std::uint32_t end);
  [[nodiscard]] static bool may_go(const Block& block, bool has_contents) noexcept;

  void begin_windows(Number number);
  void begin_token();
  [[nodiscard]] bool is_last_token() const;
  void give_blocks_to_windows();
  [[nodiscard]] bool evict_read();
  [[nodiscard]] std::optional<Job> load_of_windows();
  void window_load_ended(const Job& job, bool done);
  [[nodiscard]] std::optional<Job> next_load();
  [[nodiscard]] std::optional<Job> next_store();
  [[nodiscard]] std::optional<Job> load_of(Number number);
  [[nodiscard]] std::optional<Job> store_of(Number number, Part part);
  Job begin_job(Way way, Number number, std::vector<Place> places);
  void give_up_block(Sequence& sequence, std::uint32_t index);
  void finish(Number number);
  void drop_if_over(Number number);

  const Limits limits_;
  std::map<Number, Sequence> sequences_;
  std::deque<Number> arrivals_;  ///< New ones, in front of the others.
  std::deque<Number> ready_;     ///< Whose context has been computed.
  std::optional<Turn> turn_;
  std::optional<Windows> windows_;  ///< Of the turn, when it decodes in them.
  std::map<JobId, Job> jobs_;
  std::uint32_t loads_ = 0;   ///< Of the jobs.
  std::uint32_t stores_ = 0;  ///< Of the jobs.
  JobId next_job_ = 1;
  std::set<std::uint32_t> free_;  ///< Lowest first: neighbours are copied together.
  std::uint64_t host_reserved_ = 0;
  std::uint64_t most_blocks_ = 0;  ///< Of all sequences that go on, at their longest.
};

}  // namespace kvferry::cli
