// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_log.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/ring_format.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class TransitionLogTest : public testing::Test {
 protected:
  void SetUp() override {
    auto dir = RuntimeDir::open(base_.path().native(), "test");
    ASSERT_TRUE(dir.has_value()) << dir.error().to_string();
    dir_.emplace(*std::move(dir));
  }

  TransitionLog make(const std::string& role = "worker", std::size_t records = 16) {
    TransitionWriter writer{.role = role, .engine = "chat", .rank = Rank{3}};
    writer.incarnation = Digest::random();
    auto log = TransitionLog::create(*dir_, writer, records);
    EXPECT_TRUE(log.has_value()) << log.error().to_string();
    return log ? *std::move(log) : TransitionLog();
  }
  TransitionTrace read() {
    auto trace = read_transitions(*dir_);
    EXPECT_TRUE(trace.has_value()) << trace.error().to_string();
    return trace ? *std::move(trace) : TransitionTrace();
  }
  std::vector<fs::path> rings() {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(dir_->transitions_folder())) {
      found.push_back(entry.path());
    }
    return found;
  }

  test::ShortTempDir base_;
  std::optional<RuntimeDir> dir_;
};

TEST_F(TransitionLogTest, WhatIsRecordedIsRead) {
  const TransitionLog log = make("mover");
  const SessionId session = Digest::random();
  const IncarnationId peer = Digest::random();
  log.record(Transition::kOwnerRecord,
             {.session = session, .epoch = Epoch{4}, .lease = LeaseId{9}, .peer = peer});
  log.record(Transition::kOwnerKeep, {.session = session, .epoch = Epoch{4}, .detail = 1U << 20U});
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.writers, SizeIs(1));
  EXPECT_EQ(trace.writers[0].who.role, "mover");
  EXPECT_EQ(trace.writers[0].who.engine, "chat");
  EXPECT_EQ(trace.writers[0].who.rank, Rank{3});
  EXPECT_EQ(trace.writers[0].who.pid, ::getpid());
  EXPECT_FALSE(trace.writers[0].who.ended);
  EXPECT_EQ(trace.writers[0].lost, 0U);
  ASSERT_THAT(trace.records, SizeIs(2));
  EXPECT_EQ(trace.records[0].transition, Transition::kOwnerRecord);
  EXPECT_EQ(trace.records[0].session, session.low());
  EXPECT_EQ(trace.records[0].epoch, Epoch{4});
  EXPECT_EQ(trace.records[0].lease, LeaseId{9});
  EXPECT_EQ(trace.records[0].peer, peer.low());
  EXPECT_EQ(trace.records[1].detail, 1U << 20U);
  EXPECT_LE(trace.records[0].time, trace.records[1].time);
  EXPECT_THAT(describe(trace, trace.records[0]),
              HasSubstr("mover chat/3 pid " + std::to_string(::getpid()) + " records lease 9 on "));
}

TEST_F(TransitionLogTest, AFullRingLosesItsOldest) {
  const TransitionLog log = make("worker", 16);
  for (std::uint64_t i = 1; i <= 100; ++i) log.record(Transition::kOwnerReady, {.epoch = Epoch{i}});
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.records, SizeIs(16));
  EXPECT_EQ(trace.records.front().epoch, Epoch{85});
  EXPECT_EQ(trace.records.back().epoch, Epoch{100});
  EXPECT_EQ(trace.writers[0].lost, 84U);
}

TEST_F(TransitionLogTest, OutlivesItsWriterUntilTheLastOneLeaves) {
  make("worker").record(Transition::kOwnerReady, {.epoch = Epoch{1}});
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.writers, SizeIs(1));
  EXPECT_TRUE(trace.writers[0].who.ended);
  EXPECT_THAT(trace.records, SizeIs(1));
  dir_.reset();
  EXPECT_FALSE(fs::exists(base_.path() / "test"));
}

TEST_F(TransitionLogTest, MergesWritersInTheOrderOfTime) {
  const TransitionLog first = make("worker");
  const TransitionLog second = make("mover");
  for (std::uint64_t i = 1; i <= 6; ++i) {
    (i % 2 == 0 ? first : second).record(Transition::kOwnerReady, {.epoch = Epoch{i}});
  }
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.records, SizeIs(6));
  for (std::uint64_t i = 0; i < 6; ++i) EXPECT_EQ(trace.records[i].epoch, Epoch{i + 1});
}

TEST_F(TransitionLogTest, ThreadsRecordSideBySide) {
  const TransitionLog log = make("worker", 4096);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&log, t] {
      for (std::uint64_t i = 1; i <= 1000; ++i) {
        log.record(Transition::kOwnerReady, {.epoch = Epoch{i}, .detail = t});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.records, SizeIs(4000));
  std::vector<std::uint64_t> last(4);
  for (const TransitionRecord& record : trace.records) {
    EXPECT_EQ(record.epoch.value, ++last.at(record.detail));
  }
}

TEST_F(TransitionLogTest, KeepsTheNewestEndedRingsOnly) {
  for (std::size_t i = 0; i < TransitionLog::kEndedKept + 5; ++i) (void)make();
  const TransitionLog living = make();
  EXPECT_THAT(rings(), SizeIs(TransitionLog::kEndedKept + 1));
}

TEST_F(TransitionLogTest, RefusesASizeThatIsNoPowerOfTwo) {
  for (const std::size_t records : {0U, 1U, 100U, 3U << 20U}) {
    const auto log = TransitionLog::create(*dir_, {.role = "worker"}, records);
    ASSERT_FALSE(log.has_value()) << records;
    EXPECT_EQ(log.error().code, ErrorCode::kInvalidArgument);
  }
}

TEST_F(TransitionLogTest, ALogThatIsNoneRecordsNothing) {
  TransitionLog().record(Transition::kOwnerReady, {});
  EXPECT_EQ(read_transitions(*dir_).error().code, ErrorCode::kNotFound);
}

// Whatever stands in the files: what is read is what was written, or it is left out.
TEST_F(TransitionLogTest, BrokenBytesAreLeftOut) {
  const TransitionLog log = make("worker", 16);
  for (std::uint64_t i = 1; i <= 16; ++i) {
    log.record(Transition::kOwnerReady, {.epoch = Epoch{i}, .detail = 1000 + i});
  }
  const fs::path ring = rings().at(0);
  std::string bytes;
  {
    std::ifstream in(ring, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(in), {});
  }
  std::mt19937_64 random(7);
  for (int round = 0; round < 500; ++round) {
    std::string broken = bytes;
    for (std::uint64_t i = 0; i <= random() % 4; ++i) {
      broken[random() % broken.size()] = static_cast<char>(random());
    }
    if (random() % 8 == 0) broken.resize(random() % broken.size());
    std::ofstream(base_.path() / "test" / "transitions" / "other", std::ios::binary) << broken;
    const TransitionTrace trace = read();
    std::size_t sound = 0;
    for (const TransitionRecord& record : trace.records) {
      if (record.detail == 1000 + record.epoch.value) ++sound;
    }
    EXPECT_EQ(sound, trace.records.size()) << "round " << round;
    EXPECT_GE(sound, 16U);
    (void)check_transitions(trace);
    for (const TransitionRecord& record : trace.records) (void)describe(trace, record);
  }
}

TEST_F(TransitionLogTest, ATimeThatNoClockShowsIsLeftOut) {
  using transitions::RingRecord;
  const TransitionLog log = make();
  log.record(Transition::kOwnerReady, {.epoch = Epoch{1}});
  log.record(Transition::kOwnerRevoke, {.epoch = Epoch{1}});
  std::fstream ring(rings().at(0), std::ios::binary | std::ios::in | std::ios::out);
  std::array<std::uint64_t, sizeof(RingRecord) / sizeof(std::uint64_t)> record{};
  ring.seekg(transitions::kHeaderBytes);
  ring.read(reinterpret_cast<char*>(record.data()), sizeof(record));
  transitions::RecordWords words{};
  std::copy(record.begin() + 1, record.end(), words.begin());
  words[0] = UINT64_MAX / 2;
  record[0] = transitions::seal(1, words);
  record[1] = words[0];
  ring.seekp(transitions::kHeaderBytes);
  ring.write(reinterpret_cast<const char*>(record.data()), sizeof(record));
  ring.close();
  const TransitionTrace trace = read();
  ASSERT_THAT(trace.records, SizeIs(1));
  EXPECT_EQ(trace.records[0].transition, Transition::kOwnerRevoke);
  EXPECT_EQ(trace.writers[0].lost, 1U);
}

TEST_F(TransitionLogTest, FilesThatAreNoRingsAreLeftOut) {
  const TransitionLog log = make();
  const fs::path folder = dir_->transitions_folder();
  std::ofstream(folder / "empty");
  std::ofstream(folder / "text") << std::string(5000, 'x');
  fs::create_directory(folder / "folder");
  fs::create_symlink("/etc/hostname", folder / "link");
  const TransitionTrace trace = read();
  EXPECT_THAT(trace.writers, SizeIs(1));
  fs::remove(folder / "folder");
}

TEST(TransitionNamesTest, EveryOneHasItsOwn) {
  for (std::uint32_t i = 1; i < static_cast<std::uint32_t>(Transition::kEnd); ++i) {
    const auto transition = static_cast<Transition>(i);
    EXPECT_EQ(parse_transition(to_string(transition)), transition) << to_string(transition);
  }
  EXPECT_FALSE(parse_transition("owner.sleeps").has_value());
  EXPECT_EQ(to_string(Transition::kEnd), "unknown");
}

}  // namespace
}  // namespace kvferry::ipc
