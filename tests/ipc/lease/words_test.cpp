// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/words.hpp"

#include "lease/lease_words.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <set>
#include <utility>

namespace kvferry::ipc {
namespace {

using words::OwnerState;

constexpr std::array kPhases{LeasePhase::kVacant,  LeasePhase::kReady,       LeasePhase::kRevoking,
                             LeasePhase::kCleared, LeasePhase::kQuarantined, LeasePhase::kShutdown};

// The byte map is what two builds of this program must agree on.
static_assert(words::kOwnerWordOffset == 128 && words::kOwnerSegmentBytes == 256);
static_assert(words::kReleasedOffset == 128 && words::kAttachedOffset == 256);
static_assert(words::kBeatOffset == 384 && words::kPreparedOffset == 512);
static_assert(words::kAttacherSegmentBytes == 640);
static_assert(words::published_value(words::kOwnerMagic) == 0x4B564F57'00000002);
static_assert(words::pack({Epoch{3}, LeasePhase::kRevoking}) == 0x302);

TEST(LeaseWordsTest, PhasesMoveAsTheTableOfTheHandshakeSaysAndInNoOtherWay) {
  using P = LeasePhase;
  const std::set<std::pair<P, P>> allowed{
      {P::kVacant, P::kReady},         {P::kVacant, P::kShutdown},
      {P::kReady, P::kRevoking},       {P::kRevoking, P::kCleared},
      {P::kRevoking, P::kQuarantined}, {P::kCleared, P::kReady},
      {P::kCleared, P::kShutdown},     {P::kQuarantined, P::kReady},
      {P::kQuarantined, P::kShutdown}};
  for (const P from : kPhases) {
    for (const P to : kPhases) {
      EXPECT_EQ(can_move(from, to), allowed.contains({from, to}))
          << to_string(from) << " -> " << to_string(to);
    }
  }
}

TEST(LeaseWordsTest, EpochGrowsByOneWithReadyAndOnlyThere) {
  for (const LeasePhase from : kPhases) {
    for (const LeasePhase to : kPhases) {
      for (std::uint64_t epoch = 4; epoch <= 7; ++epoch) {
        const bool right_epoch = epoch == (to == LeasePhase::kReady ? 6U : 5U);
        EXPECT_EQ(words::can_move({Epoch{5}, from}, {Epoch{epoch}, to}),
                  can_move(from, to) && right_epoch);
      }
    }
  }
}

TEST(LeaseWordsTest, PackAndUnpackAreInverseAndReservedPhasesAreRefused) {
  for (const LeasePhase phase : kPhases) {
    for (const std::uint64_t epoch : {std::uint64_t{0}, std::uint64_t{1}, words::kMaxEpoch}) {
      OwnerState back;
      ASSERT_TRUE(words::unpack(words::pack({Epoch{epoch}, phase}), back));
      EXPECT_EQ(back, (OwnerState{Epoch{epoch}, phase}));
    }
  }
  OwnerState untouched{Epoch{9}, LeasePhase::kReady};
  for (std::uint64_t phase = 6; phase < 256; ++phase) {
    EXPECT_FALSE(words::unpack(std::uint64_t{1} << 8 | phase, untouched));
  }
  EXPECT_EQ(untouched, (OwnerState{Epoch{9}, LeasePhase::kReady}));
}

TEST(LeaseWordsTest, OwnersMovesAreSeenThroughTheDescriptor) {
  const SessionId session = Digest::random();
  auto owner = lease::OwnerWords::create(session);
  ASSERT_TRUE(owner);
  const UniqueFd fd(::dup(owner->fd()));
  auto view = lease::OwnerWordsView::map(fd, session);
  ASSERT_TRUE(view) << view.error().to_string();
  owner->move({Epoch{1}, LeasePhase::kReady});
  owner->move({Epoch{1}, LeasePhase::kRevoking});
  auto seen = view->load();
  ASSERT_TRUE(seen);
  EXPECT_EQ(*seen, (OwnerState{Epoch{1}, LeasePhase::kRevoking}));
}

TEST(LeaseWordsTest, SegmentOfAnotherSessionIsRefused) {
  auto owner = lease::OwnerWords::create(Digest::random());
  ASSERT_TRUE(owner);
  const UniqueFd fd(::dup(owner->fd()));
  const auto view = lease::OwnerWordsView::map(fd, Digest::random());
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kProtocol);
}

TEST(LeaseWordsTest, AttachersSegmentIsNoOwnersSegment) {
  const IncarnationId incarnation = Digest::random();
  auto attacher = lease::AttacherWords::create(incarnation);
  ASSERT_TRUE(attacher);
  const UniqueFd fd(::dup(attacher->fd()));
  EXPECT_FALSE(lease::OwnerWordsView::map(fd, incarnation));
  EXPECT_TRUE(lease::AttacherWordsView::map(fd, incarnation));
}

TEST(LeaseWordsTest, UnsealedMemoryIsRefused) {
  const UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(fd.valid());
  ASSERT_EQ(::ftruncate(fd.get(), words::kAttacherSegmentBytes), 0);
  const auto view = lease::AttacherWordsView::map(fd, Digest{});
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kProtocol);
}

TEST(LeaseWordsTest, NobodyElseCanMapTheWordsWritable) {
  auto attacher = lease::AttacherWords::create(Digest::random());
  ASSERT_TRUE(attacher);
  void* mapped = ::mmap(nullptr, words::kAttacherSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                        attacher->fd(), 0);
  EXPECT_EQ(mapped, MAP_FAILED);
  EXPECT_EQ(errno, EPERM);
}

TEST(LeaseWordsTest, ReleasedWordIsSeenAndGrows) {
  const IncarnationId incarnation = Digest::random();
  auto attacher = lease::AttacherWords::create(incarnation);
  ASSERT_TRUE(attacher);
  const UniqueFd fd(::dup(attacher->fd()));
  auto view = lease::AttacherWordsView::map(fd, incarnation);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->released(), LeaseId{0});
  attacher->release_up_to(LeaseId{7});
  EXPECT_EQ(view->released(), LeaseId{7});
}

TEST(LeaseWordsTest, PreparedWordIsSeenAndKeptApartFromTheReleasedOne) {
  const IncarnationId incarnation = Digest::random();
  auto attacher = lease::AttacherWords::create(incarnation);
  ASSERT_TRUE(attacher);
  const UniqueFd fd(::dup(attacher->fd()));
  auto view = lease::AttacherWordsView::map(fd, incarnation);
  ASSERT_TRUE(view);
  EXPECT_EQ(view->prepared(), LeaseId{0});
  attacher->set_prepared(LeaseId{3});
  EXPECT_EQ(view->prepared(), LeaseId{3});
  EXPECT_EQ(view->released(), LeaseId{0});
}

TEST(LeaseWordsDeathTest, ForbiddenMovesAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto owner = lease::OwnerWords::create(Digest::random());
  ASSERT_TRUE(owner);
  EXPECT_DEATH(owner->move({Epoch{1}, LeasePhase::kCleared}), "epoch 0 vacant cannot become");
  owner->move({Epoch{1}, LeasePhase::kReady});
  EXPECT_DEATH(owner->move({Epoch{2}, LeasePhase::kRevoking}), "cannot become epoch 2 revoking");
}

TEST(LeaseWordsDeathTest, ReleasedWordNeverGoesBack) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto attacher = lease::AttacherWords::create(Digest::random());
  ASSERT_TRUE(attacher);
  attacher->release_up_to(LeaseId{7});
  EXPECT_DEATH(attacher->release_up_to(LeaseId{6}), "would go back from 7 to 6");
}

TEST(LeaseWordsDeathTest, PreparedWordNamesEachLeaseOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto attacher = lease::AttacherWords::create(Digest::random());
  ASSERT_TRUE(attacher);
  attacher->set_prepared(LeaseId{7});
  EXPECT_DEATH(attacher->set_prepared(LeaseId{7}), "would go from 7 to 7");
}

}  // namespace
}  // namespace kvferry::ipc
