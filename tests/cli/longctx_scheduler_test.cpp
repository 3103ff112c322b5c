// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/turn_scheduler.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Way = TurnScheduler::Way;
using Number = TurnScheduler::Number;

/// Blocks of four tokens; turns of two blocks, of a device that has twice as many.
TurnScheduler::Limits small_limits() {
  TurnScheduler::Limits limits;
  limits.device_blocks = 4;
  limits.host_blocks = 100;
  limits.active_blocks = 2;
  limits.tokens_per_block = 4;
  limits.slice = 1;
  limits.job_blocks = 8;
  limits.jobs_each_way = 2;
  return limits;
}

/// Computes all that a turn is to compute.
std::vector<Number> take_turn(TurnScheduler& sut) {
  const auto turn = sut.begin_turn();
  if (!turn) return {};
  for (const Number number : turn->members) sut.computed(number, sut.to_compute(number));
  sut.end_turn();
  return turn->members;
}

/// Does jobs at once until there is none; returns how many blocks went each way.
std::pair<std::size_t, std::size_t> do_jobs(TurnScheduler& sut) {
  std::pair<std::size_t, std::size_t> blocks;
  while (const auto job = sut.next_job()) {
    (job->way == Way::kStore ? blocks.first : blocks.second) += job->places.size();
    sut.job_ended(job->id, true);
    sut.check();
  }
  return blocks;
}

TEST(TurnSchedulerTest, MovesNothingWhenTheDeviceHoldsAll) {
  TurnScheduler sut(small_limits());
  ASSERT_TRUE(sut.arrive(1, 4, 3));
  ASSERT_TRUE(sut.arrive(2, 4, 3));
  for (int turn = 0; turn < 4; ++turn) {
    // A block each for the context, two each for one token more.
    EXPECT_EQ(take_turn(sut).size(), turn == 0 ? 2U : 1U);
    EXPECT_EQ(do_jobs(sut), std::make_pair(0UL, 0UL));
  }
  while (sut.sequences() > 0) ASSERT_FALSE(take_turn(sut).empty());
  EXPECT_EQ(sut.free_blocks(), 4U);
  EXPECT_EQ(sut.host_reserved(), 0U);
}

TEST(TurnSchedulerTest, TurnsGoRoundAndWhatWasComputedLastGoesFirst) {
  TurnScheduler sut(small_limits());
  for (Number number = 0; number < 4; ++number) ASSERT_TRUE(sut.arrive(number, 5, 3));
  std::vector<Number> turns;
  while (sut.sequences() > 0) {
    (void)do_jobs(sut);
    const auto members = take_turn(sut);
    ASSERT_EQ(members.size(), 1U);
    turns.push_back(members.front());
  }
  EXPECT_THAT(turns, ElementsAre(0, 1, 2, 3, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0));
}

TEST(TurnSchedulerTest, LoadsTheNextTurnDuringATurnWithLookAheadOnly) {
  for (const bool look_ahead : {true, false}) {
    auto limits = small_limits();
    limits.look_ahead = look_ahead;
    TurnScheduler sut(limits);
    for (Number number = 0; number < 4; ++number) ASSERT_TRUE(sut.arrive(number, 7, 3));
    for (int turn = 0; turn < 6; ++turn) {
      (void)do_jobs(sut);
      ASSERT_FALSE(take_turn(sut).empty());
    }
    (void)do_jobs(sut);
    const auto turn = sut.begin_turn();
    ASSERT_TRUE(turn);
    const auto [stored, loaded] = do_jobs(sut);
    EXPECT_EQ(loaded > 0, look_ahead);
    for (const Number number : turn->members) sut.computed(number, 1);
    sut.end_turn();
    EXPECT_EQ(sut.begin_turn().has_value(), look_ahead) << "its blocks are there";
  }
}

TEST(TurnSchedulerTest, StoresABlockOnceUnlessItWasWrittenSince) {
  auto limits = small_limits();
  limits.look_ahead = false;
  TurnScheduler sut(limits);
  for (Number number = 0; number < 4; ++number) ASSERT_TRUE(sut.arrive(number, 6, 10));
  std::size_t stored = 0;
  for (int turn = 0; turn < 4; ++turn) {
    stored += do_jobs(sut).first;
    ASSERT_FALSE(take_turn(sut).empty());
  }
  stored += do_jobs(sut).first;
  EXPECT_EQ(stored, 7U) << "two blocks of each, and one of what is next: it writes the other";
  for (int turn = 0; turn < 4; ++turn) {
    ASSERT_FALSE(take_turn(sut).empty());
    EXPECT_EQ(do_jobs(sut).first, 1U) << "one token more, in the second block";
  }
}

TEST(TurnSchedulerTest, ASequenceIsRefusedThatHostMemoryDoesNotHoldBesideTheOthers) {
  auto limits = small_limits();
  limits.host_blocks = 7;
  TurnScheduler sut(limits);
  ASSERT_TRUE(sut.arrive(1, 4, 4));
  ASSERT_TRUE(sut.arrive(2, 4, 4));
  const auto refused = sut.arrive(3, 4, 4);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ipc::ErrorCode::kNoHostMemory);
  EXPECT_THAT(refused.error().message, HasSubstr("needs 3 blocks of host memory, 1 of 7 are left"));
  sut.leave(1);
  EXPECT_TRUE(sut.arrive(3, 4, 4));
}

TEST(TurnSchedulerTest, ASequenceIsRefusedOfWhichTheDeviceHoldsNoWindow) {
  auto limits = small_limits();
  limits.device_blocks = limits.active_blocks = 1;
  TurnScheduler sut(limits);
  const auto refused = sut.arrive(1, 16, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ipc::ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().message,
              HasSubstr("grows to 5 blocks, the device has 1: give it all of them, or 2 at least"));
}

TEST(TurnSchedulerTest, ASequenceOfNoTokensOrTooManyIsRefused) {
  TurnScheduler sut(small_limits());
  EXPECT_EQ(sut.arrive(1, 0, 1).error().code, ipc::ErrorCode::kInvalidArgument);
  EXPECT_THAT(sut.arrive(1, 4'294'967'295, 1).error().message,
              HasSubstr("has a context of 4294967295 tokens and computes 1 more"));
}

/// The context of one sequence, however many turns it takes.
void compute_context(TurnScheduler& sut, Number number, std::uint32_t context) {
  while (sut.tokens(number) < context) {
    (void)do_jobs(sut);
    ASSERT_FALSE(take_turn(sut).empty());
  }
  (void)do_jobs(sut);
}

/// All passes of a token; returns how many blocks were read and how many loaded.
std::pair<std::size_t, std::size_t> read_token(TurnScheduler& sut) {
  std::size_t read = 0;
  std::size_t loaded = 0;
  while (!sut.is_read()) {
    const auto window = sut.begin_window();
    if (!window.empty()) sut.end_window();
    read += window.size();
    const auto [stored, more] = do_jobs(sut);
    if (window.empty() && more == 0) break;
    loaded += more;
  }
  return {read, loaded};
}

TEST(TurnSchedulerTest, ATokenInWindowsReadsEveryBlockAndLoadsWhatTheDeviceDoesNotHold) {
  for (const bool look_ahead : {true, false}) {
    auto limits = small_limits();
    limits.look_ahead = look_ahead;
    limits.slice = 3;
    TurnScheduler sut(limits);
    ASSERT_TRUE(sut.arrive(1, 40, 3));
    ASSERT_NO_FATAL_FAILURE(compute_context(sut, 1, 40));
    ASSERT_TRUE(sut.begin_turn());
    ASSERT_TRUE(sut.in_windows());
    for (int token = 0; token < 3; ++token) {
      EXPECT_EQ(read_token(sut), std::make_pair(11UL, 7UL)) << "of 11 blocks the device has 4";
      sut.computed(1, 1);
      sut.check();
    }
    sut.end_turn();
    EXPECT_EQ(sut.free_blocks(), 4U);
    EXPECT_EQ(sut.host_reserved(), 0U);
  }
}

TEST(TurnSchedulerTest, ATokenThatReadsIsNotComputedYet) {
  TurnScheduler sut(small_limits());
  ASSERT_TRUE(sut.arrive(1, 40, 3));
  ASSERT_NO_FATAL_FAILURE(compute_context(sut, 1, 40));
  ASSERT_TRUE(sut.begin_turn());
  EXPECT_FALSE(sut.is_read());
  EXPECT_DEATH(sut.computed(1, 1), "a token was computed of a part");
}

TEST(TurnSchedulerTest, TheLastTokenInWindowsMakesRoomForTheNextTurn) {
  auto limits = small_limits();
  limits.slice = 2;
  TurnScheduler sut(limits);
  ASSERT_TRUE(sut.arrive(1, 40, 4));
  ASSERT_NO_FATAL_FAILURE(compute_context(sut, 1, 40));
  ASSERT_TRUE(sut.arrive(2, 7, 4));
  ASSERT_NO_FATAL_FAILURE(compute_context(sut, 2, 7));
  // What was computed last goes first.
  ASSERT_EQ(take_turn(sut), std::vector<Number>{2});
  (void)do_jobs(sut);
  ASSERT_TRUE(sut.begin_turn());
  ASSERT_TRUE(sut.in_windows());
  // The device has 4 blocks of 11. The second token's are followed by the two of what is next.
  EXPECT_EQ(read_token(sut).second, 7U);
  sut.computed(1, 1);
  (void)read_token(sut);
  (void)do_jobs(sut);
  sut.computed(1, 1);
  sut.end_turn();
  const auto next = sut.begin_turn();
  ASSERT_TRUE(next) << "its blocks were loaded meanwhile";
  EXPECT_THAT(next->members, ElementsAre(2));
}

TEST(TurnSchedulerTest, WithoutLookAheadNothingIsReadInWindowsWhileSomethingIsLoaded) {
  auto limits = small_limits();
  limits.look_ahead = false;
  TurnScheduler sut(limits);
  ASSERT_TRUE(sut.arrive(1, 40, 3));
  ASSERT_NO_FATAL_FAILURE(compute_context(sut, 1, 40));
  ASSERT_TRUE(sut.begin_turn());
  while (!sut.begin_window().empty()) {
    EXPECT_FALSE(sut.next_job()) << "nothing is loaded while something can be read";
    sut.end_window();
  }
  const auto job = sut.next_job();
  ASSERT_TRUE(job);
  EXPECT_EQ(job->way, Way::kLoad);
  EXPECT_THAT(sut.begin_window(), testing::IsEmpty());
  sut.job_ended(job->id, true);
  while (const auto more = sut.next_job()) sut.job_ended(more->id, true);
  EXPECT_THAT(sut.begin_window(), testing::Not(testing::IsEmpty()));
}

TEST(TurnSchedulerTest, AFailedJobComesAgain) {
  TurnScheduler sut(small_limits());
  for (Number number = 0; number < 4; ++number) ASSERT_TRUE(sut.arrive(number, 6, 2));
  ASSERT_FALSE(take_turn(sut).empty());
  const auto job = sut.next_job();
  ASSERT_TRUE(job);
  EXPECT_EQ(job->way, Way::kStore);
  sut.job_ended(job->id, false);
  const auto again = sut.next_job();
  ASSERT_TRUE(again);
  EXPECT_EQ(again->sequence, job->sequence);
  EXPECT_EQ(again->places.size(), job->places.size());
}

TEST(TurnSchedulerTest, ABlockThatAStoreReadsIsNotWritten) {
  auto limits = small_limits();
  limits.device_blocks = 6;
  TurnScheduler sut(limits);
  for (Number number = 0; number < 4; ++number) ASSERT_TRUE(sut.arrive(number, 6, 2));
  ASSERT_FALSE(take_turn(sut).empty());
  ASSERT_FALSE(take_turn(sut).empty());
  const auto job = sut.next_job();
  ASSERT_TRUE(job);
  for (Number number = 0; number < 4; ++number) {
    if (number != job->sequence) sut.leave(number);
  }
  EXPECT_FALSE(sut.begin_turn()) << "its last block is being stored";
  sut.job_ended(job->id, true);
  EXPECT_TRUE(sut.begin_turn());
}

TEST(TurnSchedulerTest, WhatHostMemoryMayHaveLostIsStoredAgainBeforeTheDeviceGivesItUp) {
  auto limits = small_limits();
  limits.look_ahead = false;
  TurnScheduler sut(limits);
  for (Number number = 0; number < 3; ++number) ASSERT_TRUE(sut.arrive(number, 7, 9));
  for (int turn = 0; turn < 3; ++turn) {
    (void)do_jobs(sut);
    ASSERT_FALSE(take_turn(sut).empty());
  }
  (void)do_jobs(sut);
  EXPECT_EQ(do_jobs(sut).first, 0U) << "all is stored";
  sut.doubt_host();
  sut.check();
  // Each beside what may be there of it, for which a sequence has room for one block.
  std::vector<TurnScheduler::Job> jobs;
  while (const auto job = sut.next_job()) {
    EXPECT_EQ(job->way, Way::kStore) << "nothing is given up before it is stored";
    EXPECT_EQ(job->places.size(), 1U);
    for (const TurnScheduler::Job& other : jobs) EXPECT_NE(job->sequence, other.sequence);
    jobs.push_back(*job);
    sut.check();
  }
  EXPECT_FALSE(jobs.empty());
  for (const TurnScheduler::Job& job : jobs) sut.job_ended(job.id, true);
  while (sut.sequences() > 0) {
    (void)do_jobs(sut);
    ASSERT_FALSE(take_turn(sut).empty()) << "every sequence goes on";
  }
}

/// Device and host memory, and an engine that does whatever it may, in any order. Every block's
/// contents are followed: what a turn reads is what was last computed.
class World {
 public:
  World(std::uint64_t seed, bool look_ahead) : random_(seed), limits_(draw(look_ahead)) {
    sut_.emplace(limits_);
  }

  void step() {
    switch (below(10)) {
      case 0: arrive(); break;
      case 1: leave(); break;
      case 2:
      case 3: begin_job(); break;
      case 4:
      case 5: end_job(below(4) != 0 && !host_is_full_); break;
      case 6:
        host_is_full_ = below(8) == 0;
        if (below(8) == 0) sut_->doubt_host();
        break;
      case 7:
        if (window_.empty()) end_turn();  // however much of it was computed: a preemption
        break;
      default: compute(); break;
    }
    sut_->check();
  }

  /// From now on everything goes well: all sequences have to end, in so many rounds.
  void drain() {
    host_is_full_ = false;
    std::uint64_t rounds = 0;
    while (sut_->sequences() > 0) {
      ASSERT_LT(++rounds, 100'000U) << "nothing goes on: " << sut_->sequences() << " sequences";
      begin_job();
      if (below(2) == 0) end_job(true);
      compute();
      if (turn_ && !can_compute() && window_.empty()) end_turn();
    }
    EXPECT_EQ(sut_->free_blocks(), limits_.device_blocks);
    EXPECT_EQ(sut_->host_reserved(), 0U);
    EXPECT_EQ(sut_->jobs(), 0U);
  }
  [[nodiscard]] std::uint64_t turns() const noexcept { return turns_; }
  [[nodiscard]] std::uint64_t tokens_in_windows() const noexcept { return tokens_in_windows_; }
  [[nodiscard]] std::uint64_t loads() const noexcept { return loads_; }

 private:
  struct UnderWay {
    TurnScheduler::Job job;
    std::vector<std::uint64_t> contents;  ///< Of the source, when it began.
  };

  std::uint32_t below(std::uint32_t bound) { return static_cast<std::uint32_t>(random_() % bound); }

  TurnScheduler::Limits draw(bool look_ahead) {
    TurnScheduler::Limits limits;
    limits.device_blocks = 2 + below(14);
    limits.host_blocks = 10 + below(60);
    limits.active_blocks = 1 + below(limits.device_blocks);
    limits.active_sequences = 1 + below(4);
    limits.tokens_per_block = 1 + below(5);
    limits.slice = 1 + below(7);
    limits.job_blocks = 1 + below(6);
    limits.jobs_each_way = 1 + below(3);
    limits.window_blocks = 1 + below(4);
    limits.look_ahead = look_ahead;
    return limits;
  }

  /// Some are larger than the device by themselves.
  void arrive() {
    const std::uint32_t most =
        limits_.device_blocks * limits_.tokens_per_block * (below(4) == 0 ? 3 : 1);
    const Number number = next_number_++;
    const std::uint32_t context = 1 + below(most);
    if (!sut_->arrive(number, context, below(most))) return;
    written_[number];
    if (context > limits_.device_blocks * limits_.tokens_per_block) larger_.insert(number);
    present_.push_back(number);
  }

  void leave() {
    if (present_.empty()) return;
    const Number number = present_[below(static_cast<std::uint32_t>(present_.size()))];
    if (turn_ && std::count(turn_->members.begin(), turn_->members.end(), number) > 0) return;
    std::erase(present_, number);
    sut_->leave(number);
  }

  void begin_job() {
    auto job = sut_->next_job();
    if (!job) return;
    ASSERT_LE(job->places.size(), limits_.job_blocks);
    ASSERT_LT(jobs_of(job->way), limits_.jobs_each_way);
    if (job->way == Way::kLoad && turn_) {
      ASSERT_TRUE(limits_.look_ahead || sut_->in_windows());
    }
    UnderWay under_way{*job, {}};
    for (const auto& place : job->places) {
      if (job->way == Way::kStore) {
        under_way.contents.push_back(device_[place.block]);
      } else {
        ASSERT_TRUE(host_.contains({job->sequence, place.index})) << "never stored";
        under_way.contents.push_back(host_.at({job->sequence, place.index}));
        device_[place.block] = 0;  // anything until the load has ended
      }
    }
    jobs_.push_back(std::move(under_way));
  }

  [[nodiscard]] std::int64_t jobs_of(Way way) const {
    return std::count_if(jobs_.begin(), jobs_.end(),
                         [way](const UnderWay& under_way) { return under_way.job.way == way; });
  }

  void end_job(bool done) {
    if (jobs_.empty()) return;
    const auto at = jobs_.begin() + below(static_cast<std::uint32_t>(jobs_.size()));
    const UnderWay ended = std::move(*at);
    jobs_.erase(at);
    for (std::size_t i = 0; i < ended.job.places.size(); ++i) {
      const auto& place = ended.job.places[i];
      const std::pair<Number, std::uint32_t> key{ended.job.sequence, place.index};
      if (ended.job.way == Way::kStore) {
        ASSERT_EQ(device_[place.block], ended.contents[i]) << "written under a store";
        if (done) host_[key] = ended.contents[i];
      } else {
        ASSERT_EQ(device_[place.block], 0U) << "written under a load";
        if (done) device_[place.block] = ended.contents[i];
      }
    }
    if (done && ended.job.way == Way::kLoad) ++loads_;
    sut_->job_ended(ended.job.id, done);
  }

  [[nodiscard]] bool can_compute() const {
    return turn_ && std::any_of(turn_->members.begin(), turn_->members.end(),
                                [this](Number number) { return sut_->to_compute(number) > 0; });
  }

  void compute() {
    if (!turn_) {
      turn_ = sut_->begin_turn();
      if (!turn_) return;
      ++turns_;
      for (const Number number : turn_->members) read(number);
    }
    if (sut_->in_windows()) {
      compute_in_windows(turn_->members.front());
      return;
    }
    for (const Number number : turn_->members) {
      const std::uint32_t left = sut_->to_compute(number);
      if (left == 0) continue;
      const std::uint32_t from = sut_->tokens(number);
      const std::uint32_t count = 1 + below(left);
      for (std::uint32_t token = from; token < from + count; ++token) write(number, token);
      sut_->computed(number, count);
    }
  }

  void write(Number number, std::uint32_t token) {
    const std::uint32_t index = token / limits_.tokens_per_block;
    written_[number][index] = device_[sut_->device_block(number, index)] = ++next_contents_;
  }

  /// One step of a pass: its begin, or its end.
  void compute_in_windows(Number number) {
    if (!window_.empty()) {
      // Nothing has taken the place of what it reads.
      for (const std::uint32_t index : window_) read(number, index);
      window_.clear();
      sut_->end_window();
    } else if (sut_->to_compute(number) > 0) {
      if (read_.empty()) write(number, sut_->tokens(number));
      window_ = sut_->begin_window();
      for (const std::uint32_t index : window_) {
        read(number, index);
        ASSERT_TRUE(read_.insert(index).second) << "block " << index << " is read twice";
      }
    }
    if (!window_.empty() || !sut_->is_read() || sut_->to_compute(number) == 0) return;
    ASSERT_EQ(read_.size(), written_[number].size()) << "a block was not read";
    read_.clear();
    sut_->computed(number, 1);
    ++tokens_in_windows_;
  }

  void read(Number number, std::uint32_t index) {
    ASSERT_EQ(device_[sut_->device_block(number, index)], written_[number].at(index))
        << "sequence " << number << ", block " << index;
  }

  /// All of it; not of one that the device does not hold, which reads in windows, or writes only.
  void read(Number number) {
    if (sut_->in_windows() || written_[number].size() > limits_.device_blocks) return;
    if (larger_.contains(number) && turn_->is_prefill) return;
    for (const auto& [index, contents] : written_[number]) {
      ASSERT_EQ(device_[sut_->device_block(number, index)], contents)
          << "sequence " << number << ", block " << index;
    }
  }

  void end_turn() {
    if (!turn_) return;
    for (const Number number : turn_->members) read(number);
    read_.clear();
    turn_.reset();
    sut_->end_turn();
    std::erase_if(present_, [this](Number number) { return !sut_->is_present(number); });
  }

  std::mt19937_64 random_;
  const TurnScheduler::Limits limits_;
  std::optional<TurnScheduler> sut_;
  std::optional<TurnScheduler::Turn> turn_;
  std::vector<UnderWay> jobs_;
  std::vector<Number> present_;
  std::map<std::uint32_t, std::uint64_t> device_;
  std::map<std::pair<Number, std::uint32_t>, std::uint64_t> host_;
  std::map<Number, std::map<std::uint32_t, std::uint64_t>> written_;
  std::set<Number> larger_;  ///< Of which the device does not hold the context.
  std::vector<std::uint32_t> window_;
  std::set<std::uint32_t> read_;  ///< For the token that is computed in windows.
  Number next_number_ = 1;
  std::uint64_t next_contents_ = 0;
  std::uint64_t turns_ = 0;
  std::uint64_t loads_ = 0;
  std::uint64_t tokens_in_windows_ = 0;
  bool host_is_full_ = false;
};

class TurnSchedulerPropertyTest : public testing::TestWithParam<bool> {};

TEST_P(TurnSchedulerPropertyTest, WhateverHappensContentsAreKeptAndEverySequenceEnds) {
  constexpr std::uint64_t kWorlds = 1000;
  constexpr int kSteps = 400;
  std::uint64_t turns = 0;
  std::uint64_t loads = 0;
  std::uint64_t tokens_in_windows = 0;
  for (std::uint64_t seed = 0; seed < kWorlds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world(seed, GetParam());
    for (int i = 0; i < kSteps && !HasFatalFailure(); ++i) world.step();
    if (!HasFatalFailure()) world.drain();
    if (HasFailure()) return;
    turns += world.turns();
    loads += world.loads();
    tokens_in_windows += world.tokens_in_windows();
  }
  EXPECT_GT(turns, 10 * kWorlds);
  EXPECT_GT(loads, kWorlds) << "sequences that were swapped out came back";
  EXPECT_GT(tokens_in_windows, kWorlds) << "sequences that are larger than the device";
}

INSTANTIATE_TEST_SUITE_P(LookAhead,
                         TurnSchedulerPropertyTest,
                         testing::Bool(),
                         [](const auto& sort) { return sort.param ? "With" : "Without"; });

}  // namespace
}  // namespace kvferry::cli
