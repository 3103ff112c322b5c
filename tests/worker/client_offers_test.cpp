// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stores that nobody waits for, and how an engine sees that the manager has taken none of them.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/offer_pace.hpp"
#include "worker/scripted_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <memory>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::BlockId;
using ipc::Envelope;
using ipc::ErrorCode;
using ipc::IncarnationId;
using ipc::MessageKind;
using test::ScriptedManager;
using testing::ElementsAre;
using testing::HasSubstr;
using std::chrono_literals::operator""s;

class ClientOffersTest : public testing::Test {
 protected:
  ClientOffersTest() {
    ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.engine = "chat";
    client_ = Client::connect(options, Deadline::after(20s)).value();
  }
  void script(ScriptedManager::Script script) {
    manager_.run([&](ScriptedManager& manager) {
      manager.scripts[MessageKind::kOfferStore] = std::move(script);
    });
  }
  JobId offer() {
    const std::vector<StoreTarget> targets{{GroupId{0}, Digest::from_words(1, 1)},
                                           {GroupId{0}, Digest::from_words(1, 2)}};
    const std::vector<StoreItem> items{{GroupId{0}, BlockId{4}, 0}, {GroupId{0}, BlockId{5}, 1}};
    return client_->offer_store(targets, items).value();
  }
  Completion wait(JobId job) {
    return client_->wait(std::vector{job}, Deadline::after(20s)).value().at(0);
  }
  /// Answers alone are no news, of which fd() would tell.
  bool run_until(const std::function<bool()>& condition) {
    const Deadline deadline = Deadline::after(20s);
    while (!condition()) {
      if (deadline.expired()) return false;
      pollfd entry{client_->fd(), POLLIN, 0};
      ::poll(&entry, 1, 5);
    }
    return true;
  }

  const test::ShortTempDir temp_;
  const ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  test::ManagerThread manager_{dir_, [](ScriptedManager&) {}};
  std::unique_ptr<Client> client_;
};

TEST_F(ClientOffersTest, OfferIsOneMessageWithKeysAndBlocks) {
  script([](ScriptedManager& manager, const IncarnationId& from, const Envelope& request) {
    const auto offer = ipc::decode<ipc::OfferStore>(request.body, "OfferStore").value();
    EXPECT_EQ(offer.keys.size(), 2U);
    EXPECT_EQ(offer.keys.at(1).block, Digest::from_words(1, 2));
    EXPECT_EQ(offer.store.items.at(1).block, BlockId{5});
    EXPECT_EQ(offer.store.items.at(1).slot, 1U);
    (void)manager.server().reply(from, request, ipc::Empty{});
    manager.send_done(offer.store.job, {0, static_cast<std::uint8_t>(ErrorCode::kNoHostMemory)});
  });
  const Completion done = wait(offer());
  EXPECT_THAT(done.results, ElementsAre(0, static_cast<std::uint8_t>(ErrorCode::kNoHostMemory)));
  EXPECT_EQ(client_->stats().jobs_completed, 1U);
  EXPECT_EQ(client_->stats().jobs_failed, 0U) << "no room is no failure";
}

TEST_F(ClientOffersTest, RefusedOneFails) {
  script([](ScriptedManager& manager, const IncarnationId& from, const Envelope& request) {
    (void)manager.server().reply_error(from, request, KVFERRY_ERROR(kBusy, "queue is full"));
  });
  EXPECT_EQ(wait(offer()).message, "queue is full");
  EXPECT_EQ(client_->stats().jobs_failed, 1U);
}

TEST_F(ClientOffersTest, NothingIsSentOfNoBlocks) {
  const std::vector<StoreTarget> target{{GroupId{0}, Digest::from_words(1, 1)}};
  EXPECT_EQ(client_->offer_store(target, {}).error().code, ErrorCode::kInvalidArgument);
  const std::vector<StoreItem> item{{GroupId{0}, BlockId{4}, 0}};
  EXPECT_EQ(client_->offer_store({}, item).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(client_->unanswered_since(), std::nullopt);
}

TEST_F(ClientOffersTest, NothingIsSentOfARetentionBeyondTheLongest) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLongest = ipc::Retention::kLongest;
  const std::vector<StoreItem> items{{GroupId{0}, BlockId{4}, 0}, {GroupId{0}, BlockId{5}, 1}};
  std::vector<StoreTarget> targets{{GroupId{0}, Digest::from_words(1, 1)},
                                   {GroupId{0}, Digest::from_words(1, 2)}};
  for (const milliseconds duration :
       {milliseconds::max(), kLongest + milliseconds(1), milliseconds(-1), milliseconds::min()}) {
    targets[1].retention = ipc::Retention{50, duration};
    const auto offered = client_->offer_store(targets, items);
    const auto reserved = client_->reserve_store(targets, Deadline::after(20s));
    const auto text = fmt::format("target 1: a retention for {} ms; give 1 to 3153600000000 ms",
                                  duration.count());
    ASSERT_FALSE(offered.has_value());
    ASSERT_FALSE(reserved.has_value());
    for (const ipc::Error& error : {offered.error(), reserved.error()}) {
      EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.message, HasSubstr(text));
    }
    EXPECT_EQ(client_->unanswered_since(), std::nullopt);
  }
  targets[1].retention = ipc::Retention{50, kLongest};
  script([&](ScriptedManager& manager, const IncarnationId& from, const Envelope& request) {
    const auto offer = ipc::decode<ipc::OfferStore>(request.body, "OfferStore");
    EXPECT_TRUE(offer.has_value() && offer->keys.at(1).retention->duration == kLongest);
    (void)manager.server().reply(from, request, ipc::Empty{});
    manager.send_done(offer->store.job, {0, 0});
  });
  EXPECT_THAT(wait(client_->offer_store(targets, items).value()).results, ElementsAre(0, 0));
}

TEST_F(ClientOffersTest, ManagerThatTakesNothingIsSeenWithoutWaitingForIt) {
  std::vector<std::pair<IncarnationId, Envelope>> taken;  // On the manager's thread.
  script([&taken](ScriptedManager&, const IncarnationId& from, const Envelope& request) {
    taken.emplace_back(from, request);
  });
  EXPECT_EQ(client_->unanswered_since(), std::nullopt);
  const ipc::TimePoint before = ipc::MonotonicClock::now();
  (void)offer();
  const auto since = client_->unanswered_since();
  ASSERT_TRUE(since.has_value());
  EXPECT_GE(*since, before);
  EXPECT_LE(*since, ipc::MonotonicClock::now());
  (void)offer();
  EXPECT_EQ(client_->unanswered_since(), since) << "of the oldest";
  // Once it has come.
  const auto answer_one = [&] {
    bool answered = false;
    manager_.run([&](ScriptedManager& manager) {
      if (taken.empty()) return;
      (void)manager.server().reply(taken.front().first, taken.front().second, ipc::Empty{});
      taken.erase(taken.begin());
      answered = true;
    });
    return answered;
  };
  ASSERT_TRUE(run_until(answer_one));
  EXPECT_TRUE(run_until([&] { return client_->unanswered_since() > since; }));
  ASSERT_TRUE(run_until(answer_one));
  EXPECT_TRUE(run_until([&] { return !client_->unanswered_since(); }))
      << "taken is answered, done or not";
}

TEST_F(ClientOffersTest, PaceBoundsWhatIsOfferedToAManagerThatTakesNothing) {
  script([](ScriptedManager&, const IncarnationId&, const Envelope&) {});
  OfferPace pace;
  ASSERT_TRUE(pace.admit(*client_, 2, 4).has_value());
  (void)offer();
  ASSERT_TRUE(pace.admit(*client_, 2, 4).has_value()) << "as many as may be unanswered";
  (void)offer();
  EXPECT_EQ(pace.admit(*client_, 2, 4).error().code, ErrorCode::kTimeout);
  EXPECT_GE(ipc::MonotonicClock::now() - client_->unanswered_since().value(), 1s);
  // Known by now: nobody waits again.
  EXPECT_EQ(pace.admit(*client_, 1, 4).error().code, ErrorCode::kTimeout);
}

TEST(TakeOfferTest, OffersAreOfWholeUnitsUpToTheBoundAndOfOneAtLeast) {
  struct Unit {
    std::vector<int> blocks;
  };
  std::vector<Unit> units{{{1, 2, 3}}, {{4}}, {{5}}, {{6}}};
  const auto sizes = [&units](std::size_t most) {
    std::vector<std::size_t> taken;
    for (const Unit& unit : take_offer(units, most)) taken.push_back(unit.blocks.size());
    return taken;
  };
  EXPECT_THAT(sizes(2), ElementsAre(3)) << "larger than the bound";
  EXPECT_THAT(sizes(2), ElementsAre(1, 1));
  EXPECT_EQ(units.front().blocks.front(), 6) << "in their order";
  EXPECT_THAT(sizes(2), ElementsAre(1));
  EXPECT_TRUE(units.empty());
}

TEST_F(ClientOffersTest, PaceWaitsForAManagerThatAnswers) {
  script([](ScriptedManager& manager, const IncarnationId& from, const Envelope& request) {
    (void)manager.server().reply(from, request, ipc::Empty{});
  });
  OfferPace pace;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(pace.admit(*client_, 2, 1).has_value()) << i;
    (void)offer();
  }
  EXPECT_TRUE(client_->wait_answered(Deadline::after(20s)).has_value());
  EXPECT_EQ(client_->unanswered_since(), std::nullopt);
}

TEST_F(ClientOffersTest, WaitForAnswersEndsAtItsDeadlineAndWithTheClient) {
  script([](ScriptedManager&, const IncarnationId&, const Envelope&) {});
  (void)offer();
  const auto late = client_->wait_answered(Deadline::after({}));
  EXPECT_EQ(late.error().code, ErrorCode::kTimeout);
  client_->close();
  EXPECT_EQ(client_->unanswered_since(), std::nullopt) << "it owes nothing to one that is closed";
  EXPECT_EQ(client_->wait_answered(Deadline::after(20s)).error().code, ErrorCode::kCancelled);
}

}  // namespace
}  // namespace kvferry::worker
