// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Publisher and subscriber of KV events over real sockets, and programs that speak vLLM's protocol.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/kv_event_publisher.hpp"
#include "kvferry/ipc/wire/kv_event_subscriber.hpp"
#include "support/kv_picture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zmq.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvferry::ipc {
namespace {

using News = KvEventSubscriber::News;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::KvPicture;
using testing::AllOf;
using testing::ElementsAre;
using testing::Gt;

constexpr const char* kTopic = "kv@chat/default/00000000000000000000000000000001@tiny";

Digest block(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

std::string number(std::uint64_t value) {
  std::string bytes(8, '\0');
  for (auto at = bytes.rbegin(); at != bytes.rend(); ++at, value >>= 8U) {
    *at = static_cast<char>(value);
  }
  return bytes;
}

/// A host tier of which every place holds a block or none.
class Tier : public KvSnapshotSource {
 public:
  explicit Tier(std::size_t places) : places_(places) {}

  void publish_to(KvEventPublisher* publisher) { publisher_ = publisher; }
  void store(std::size_t place) {
    places_.at(place) = true;
    tell(KvStored{.hashes = {block(place)},
                  .before = {},
                  .tokens_per_block = 16,
                  .group = {},
                  .group_kind = {}});
  }
  void remove(std::size_t place) {
    places_.at(place) = false;
    tell(KvRemoved{{block(place)}, GroupId{0}});
  }
  void clear() {
    places_.assign(places_.size(), false);
    tell(KvCleared{});
  }
  [[nodiscard]] KvPicture::Blocks blocks() const {
    KvPicture::Blocks blocks;
    for (std::size_t place = 0; place < places_.size(); ++place) {
      if (places_[place]) blocks.emplace(0, block(place));
    }
    return blocks;
  }
  [[nodiscard]] Slice slice(std::uint64_t from) override {
    ++slices;
    constexpr std::size_t kPlaces = 4;
    Slice slice;
    for (std::size_t place = from; place < std::min(from + kPlaces, places_.size()); ++place) {
      if (!places_[place]) continue;
      slice.parts.push_back(
          {kTopic,
           encode_kv_events(
               {0,
                {KvStored{.hashes = {block(place)}, .before = {}, .group = {}, .group_kind = {}}}},
               KvEventEncoding::kMaps)});
    }
    if (from + kPlaces < places_.size()) slice.next = from + kPlaces;
    if (between_slices) between_slices();
    return slice;
  }

  std::size_t slices = 0;
  std::function<void()> between_slices;

 private:
  void tell(KvEvent event) {
    if (publisher_ == nullptr) return;
    publisher_->publish(kTopic, encode_kv_events({0, {std::move(event)}}, KvEventEncoding::kMaps),
                        1);
  }

  std::vector<bool> places_;
  KvEventPublisher* publisher_ = nullptr;
};

class KvEventSocketsTest : public testing::Test {
 protected:
  void TearDown() override { stop(); }

  [[nodiscard]] std::string path(const std::string& name) const {
    return "ipc://" + (dir_.path() / name).string();
  }
  [[nodiscard]] KvEventPublisher::Options options() const {
    KvEventPublisher::Options options;
    options.endpoint = path("events");
    options.snapshot_endpoint = path("ask");
    return options;
  }
  void start() { start(options()); }
  void start(const KvEventPublisher::Options& options) {
    publisher_.emplace(loop_, options, tier_);
    tier_.publish_to(&*publisher_);
  }
  void stop() {
    tier_.publish_to(nullptr);
    publisher_.reset();
  }
  void subscribe() { subscribe({publisher_->endpoint(), publisher_->snapshot_endpoint()}); }
  void subscribe(const KvEventSubscriber::Options& options) {
    picture_ = {};
    subscriber_.emplace(options);
  }

  /// Everybody goes on until it is done.
  bool run_until(const std::function<bool()>& done) {
    const Deadline end = Deadline::after(30s);
    while (!end.expired()) {
      if (done()) return true;
      loop_.run_once(Deadline::after(1ms));
      if (forward_) forward_();
      if (subscriber_) take_news();
    }
    return false;
  }
  void take_news() {
    const auto news = subscriber_->next(Deadline::after(1ms));
    ASSERT_TRUE(news.has_value()) << news.error().to_string();
    if (*news) picture_.apply(**news);
  }
  bool is_right() { return picture_.is_complete() && picture_.of(kTopic) == tier_.blocks(); }

  /// Between publisher and subscriber: what loses batches.
  void forward_without(std::set<std::uint64_t> lost) {
    lost_ = std::move(lost);
    taken_.emplace(context_, zmq::socket_type::sub);
    taken_->set(zmq::sockopt::subscribe, "");
    taken_->set(zmq::sockopt::linger, 0);
    taken_->connect(publisher_->endpoint());
    given_.emplace(context_, zmq::socket_type::pub);
    given_->set(zmq::sockopt::linger, 0);
    given_->bind(path("lossy"));
    forward_ = [this] {
      zmq::message_t topic;
      while (taken_->recv(topic, zmq::recv_flags::dontwait)) {
        zmq::message_t sequence;
        zmq::message_t batch;
        ASSERT_TRUE(taken_->recv(sequence));
        ASSERT_TRUE(taken_->recv(batch));
        ++forwarded_;
        const bool is_lost = std::any_of(lost_.begin(), lost_.end(), [&](std::uint64_t one) {
          return sequence.to_string() == number(one);
        });
        if (is_lost) continue;
        ASSERT_TRUE(given_->send(topic, zmq::send_flags::sndmore));
        ASSERT_TRUE(given_->send(sequence, zmq::send_flags::sndmore));
        ASSERT_TRUE(given_->send(batch, zmq::send_flags::none));
      }
    };
  }

  /// A client that asks by hand.
  void ask(const std::vector<std::string>& parts) {
    if (!asker_) {
      asker_.emplace(context_, zmq::socket_type::dealer);
      asker_->set(zmq::sockopt::linger, 0);
      asker_->connect(publisher_->snapshot_endpoint());
    }
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool more = i + 1 < parts.size();
      ASSERT_TRUE(asker_->send(zmq::buffer(parts[i]),
                               more ? zmq::send_flags::sndmore : zmq::send_flags::none));
    }
  }
  std::vector<std::string> answer() {
    std::vector<std::string> parts;
    zmq::message_t part;
    EXPECT_TRUE(
        run_until([&] { return asker_->recv(part, zmq::recv_flags::dontwait).has_value(); }));
    parts.push_back(part.to_string());
    while (part.more() && asker_->recv(part)) parts.push_back(part.to_string());
    return parts;
  }

  const test::ShortTempDir dir_;
  EventLoop loop_;
  Tier tier_{40};
  std::optional<KvEventPublisher> publisher_;
  std::optional<KvEventSubscriber> subscriber_;
  KvPicture picture_;
  zmq::context_t context_;
  std::optional<zmq::socket_t> taken_;
  std::optional<zmq::socket_t> given_;
  std::optional<zmq::socket_t> asker_;
  std::function<void()> forward_;
  std::set<std::uint64_t> lost_;
  std::uint64_t forwarded_ = 0;
};

TEST_F(KvEventSocketsTest, WhoComesLateBeginsWithASnapshotAndFollows) {
  start();
  for (std::size_t place = 0; place < 30; ++place) tier_.store(place);
  subscribe();
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  EXPECT_EQ(picture_.of(kTopic).size(), 30U);
  EXPECT_EQ(subscriber_->expected(), 30U);
  EXPECT_EQ(picture_.count(News::Kind::kReset), 1U);
  tier_.remove(3);
  tier_.store(35);
  EXPECT_TRUE(run_until([&] { return is_right(); }));
  tier_.clear();
  tier_.store(1);
  EXPECT_TRUE(run_until([&] { return is_right(); }));
  EXPECT_EQ(publisher_->stats().batches, 34U);
  EXPECT_EQ(publisher_->stats().events, 34U);
  EXPECT_EQ(publisher_->stats().dropped, 0U);
}

TEST_F(KvEventSocketsTest, WhatHappensBetweenTheSlicesOfASnapshotLeavesItRight) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20; ++round) {
    start();
    for (std::size_t place = 0; place < 40; place += 2) tier_.store(place);
    tier_.between_slices = [&] {
      for (int change = 0; change < 3; ++change) {
        const std::size_t place = random() % 40;
        switch (random() % 8) {
          case 0: tier_.clear(); break;
          case 1:
          case 2:
          case 3: tier_.remove(place); break;
          default: tier_.store(place); break;
        }
      }
    };
    subscribe();
    ASSERT_TRUE(run_until([&] {
      return is_right() && subscriber_->expected() == publisher_->stats().batches;
    })) << "round "
        << round;
    EXPECT_GE(tier_.slices, 10U);
    tier_.between_slices = nullptr;
    subscriber_.reset();
    stop();
  }
}

TEST_F(KvEventSocketsTest, AGapIsSeenAndFilled) {
  start();
  forward_without({1, 2, 5});
  subscribe({path("lossy"), publisher_->snapshot_endpoint()});
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  for (std::size_t place = 0; place < 8; ++place) tier_.store(place);
  ASSERT_TRUE(run_until([&] { return is_right() && forwarded_ >= 5; }));
  EXPECT_GE(picture_.count(News::Kind::kReplayed), 3U);
  EXPECT_EQ(picture_.count(News::Kind::kReplayed) + picture_.count(News::Kind::kLive), 8U);
  EXPECT_EQ(picture_.count(News::Kind::kReset), 1U) << "a replay is enough";
}

TEST_F(KvEventSocketsTest, ALastBatchThatIsLostIsFoundWithoutAnother) {
  start();
  forward_without({0});
  subscribe({path("lossy"), publisher_->snapshot_endpoint()});
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  tier_.store(0);
  EXPECT_TRUE(run_until([&] { return is_right() && picture_.of(kTopic).size() == 1; }));
}

TEST_F(KvEventSocketsTest, AGapThatIsNoLongerKeptIsFilledByASnapshot) {
  KvEventPublisher::Options few = options();
  few.kept_batches = 2;
  start(few);
  forward_without({1, 2, 3, 4, 5, 6});
  subscribe({path("lossy"), publisher_->snapshot_endpoint()});
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  for (std::size_t place = 0; place < 8; ++place) tier_.store(place);
  EXPECT_EQ(publisher_->stats().kept_batches, 2U);
  EXPECT_TRUE(run_until([&] { return is_right() && picture_.count(News::Kind::kReset) >= 2; }));
}

TEST_F(KvEventSocketsTest, AGapIsToldToWhoHasNobodyToAsk) {
  start();
  forward_without({});
  subscribe({path("lossy"), ""});
  // Before the subscription has arrived everywhere, nobody knows what it misses.
  ASSERT_TRUE(run_until([&] {
    tier_.store(0);
    return picture_.count(News::Kind::kLive) > 0;
  }));
  const std::uint64_t next = publisher_->stats().batches;
  lost_ = {next + 1, next + 2};
  for (std::size_t place = 0; place < 4; ++place) tier_.store(place);
  ASSERT_TRUE(run_until([&] { return subscriber_->expected() == next + 4; }));
  EXPECT_EQ(picture_.count(News::Kind::kLost), 1U);
  EXPECT_EQ(picture_.count(News::Kind::kReplayed), 0U);
}

TEST_F(KvEventSocketsTest, APublisherThatStartsAgainIsFollowedFromItsSnapshot) {
  start();
  for (std::size_t place = 0; place < 5; ++place) tier_.store(place);
  subscribe();
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  stop();
  tier_.clear();
  start();
  for (std::size_t place = 10; place < 13; ++place) tier_.store(place);
  EXPECT_TRUE(run_until([&] { return is_right(); }));
  EXPECT_EQ(subscriber_->expected(), 3U) << "numbers begin anew";
  EXPECT_GE(picture_.count(News::Kind::kReset), 2U);
}

TEST_F(KvEventSocketsTest, AReplayClientOfVllmGetsNumbersAndBatchesAndAnEnd) {
  KvEventPublisher::Options few = options();
  few.kept_batches = 4;
  start(few);
  for (std::size_t place = 0; place < 6; ++place) tier_.store(place);
  ask({"", number(4)});
  for (const std::uint64_t sequence : {4U, 5U}) {
    const auto parts = answer();
    ASSERT_EQ(parts.size(), 3U);
    EXPECT_EQ(parts[0], "");
    EXPECT_EQ(parts[1], number(sequence));
    const auto batch = decode_kv_events(Bytes(parts[2].begin(), parts[2].end()));
    ASSERT_TRUE(batch.has_value());
    EXPECT_EQ(std::get<KvStored>(batch->events.at(0)).hashes, std::vector{block(sequence)});
  }
  EXPECT_THAT(answer(), ElementsAre("", std::string(8, '\xff'), ""));
  // What is older than all that is kept: from the oldest on.
  ask({"", number(0)});
  for (const std::uint64_t sequence : {2U, 3U, 4U, 5U}) {
    EXPECT_EQ(answer().at(1), number(sequence));
  }
  EXPECT_THAT(answer(), ElementsAre("", std::string(8, '\xff'), ""));
}

TEST_F(KvEventSocketsTest, AskedWithAWordItTellsTopicsAndItsLife) {
  start();
  tier_.store(7);
  tier_.store(8);
  ask({"", number(1), "replay"});
  const auto replayed = answer();
  ASSERT_EQ(replayed.size(), 4U);
  EXPECT_EQ(replayed[1], number(1));
  EXPECT_EQ(replayed[3], kTopic);
  const auto end = answer();
  ASSERT_EQ(end.size(), 4U);
  EXPECT_EQ(end[1], std::string(8, '\xff'));
  EXPECT_EQ(end[2].size(), 16U);
  EXPECT_EQ(end[3], number(2));
  ask({"", number(0), "snapshot"});
  for (int i = 0; i < 2; ++i) {
    const auto part = answer();
    EXPECT_EQ(part.at(1), number(2)) << "where live events go on";
    EXPECT_EQ(part.at(3), kTopic);
  }
  EXPECT_EQ(answer(), end);
}

TEST_F(KvEventSocketsTest, WhatIsNoRequestIsCountedAndGetsNoAnswer) {
  start();
  ask({number(0)});
  ask({"", "short"});
  ask({"", number(0), "anything"});
  ask({"x", number(0)});
  ask({"", number(0), "replay", "more"});
  ask({"", number(0)});
  EXPECT_THAT(answer(), ElementsAre("", std::string(8, '\xff'), ""));
  EXPECT_EQ(publisher_->stats().requests, 6U);
  EXPECT_EQ(publisher_->stats().refused, 5U);
}

TEST_F(KvEventSocketsTest, ASubscriberThatDoesNotReadLosesBatchesAndDelaysNobody) {
  KvEventPublisher::Options few = options();
  few.most_queued = 2;
  few.kept_bytes = 1U << 20U;
  start(few);
  zmq::socket_t sleeper(context_, zmq::socket_type::sub);
  sleeper.set(zmq::sockopt::rcvhwm, 1);
  sleeper.set(zmq::sockopt::linger, 0);
  sleeper.set(zmq::sockopt::subscribe, "");
  sleeper.connect(publisher_->endpoint());
  subscribe();
  ASSERT_TRUE(run_until([&] { return picture_.is_complete(); }));
  // Larger than what the kernel holds for a reader.
  std::size_t published = 0;
  ASSERT_TRUE(run_until([&] {
    if (publisher_->stats().dropped > 0) return true;
    publisher_->publish(
        kTopic,
        encode_kv_events({0, {KvRemoved{std::vector<Digest>(20'000, block(0)), GroupId{0}}}},
                         KvEventEncoding::kMaps),
        1);
    return ++published > 1000;
  }));
  EXPECT_THAT(publisher_->stats().dropped, Gt(0U));
  EXPECT_LE(publisher_->stats().kept_bytes, 1U << 20U);
  tier_.store(1);
  EXPECT_TRUE(run_until([&] { return is_right(); })) << "whoever reads gets all";
}

TEST_F(KvEventSocketsTest, AnAskerThatDoesNotReadKeepsNobodyFromAnAnswer) {
  start();
  for (int i = 0; i < 400; ++i) tier_.store(static_cast<std::size_t>(i) % 40);
  // Their queues are small and hold less than a replay.
  std::vector<zmq::socket_t> sleepers;
  for (std::size_t i = 0; i < KvEventPublisher::kMostAnswers + 4; ++i) {
    zmq::socket_t& sleeper = sleepers.emplace_back(context_, zmq::socket_type::dealer);
    sleeper.set(zmq::sockopt::rcvhwm, 1);
    sleeper.set(zmq::sockopt::linger, 0);
    sleeper.connect(publisher_->snapshot_endpoint());
    ASSERT_TRUE(sleeper.send(zmq::str_buffer(""), zmq::send_flags::sndmore));
    ASSERT_TRUE(sleeper.send(zmq::buffer(number(0)), zmq::send_flags::none));
  }
  ASSERT_TRUE(run_until([&] { return publisher_->stats().requests == sleepers.size(); }));
  subscribe();
  EXPECT_TRUE(run_until([&] { return is_right(); }));
}

TEST_F(KvEventSocketsTest, ASecondPublisherIsRefusedAndTheFirstGoesOn) {
  start();
  subscribe();
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  const auto refused = [&](const KvEventPublisher::Options& wanted) {
    Tier other(1);
    try {
      const KvEventPublisher second(loop_, wanted, other);
    } catch (const Exception& exception) {
      return exception.error().code == ErrorCode::kAlreadyExists;
    }
    return false;
  };
  EXPECT_TRUE(refused(options()));
  tier_.store(0);
  EXPECT_TRUE(run_until([&] { return is_right(); }));
}

TEST_F(KvEventSocketsTest, PortsServeAsPathsDo) {
  KvEventPublisher::Options ports;
  ports.endpoint = "tcp://127.0.0.1:0";
  ports.snapshot_endpoint = "tcp://[::1]:0";
  std::optional<Tier> other;
  try {
    start(ports);
  } catch (const Exception&) {
    ports.snapshot_endpoint = "tcp://127.0.0.1:0";  // a machine without IPv6
    start(ports);
  }
  EXPECT_THAT(publisher_->endpoint(), testing::Not(testing::HasSubstr(":0")));
  tier_.store(4);
  subscribe();
  ASSERT_TRUE(run_until([&] { return is_right(); }));
  tier_.store(5);
  EXPECT_TRUE(run_until([&] { return is_right() && picture_.of(kTopic).size() == 2; }));
  KvEventPublisher::Options same = ports;
  same.endpoint = publisher_->endpoint();
  other.emplace(1);
  EXPECT_THROW(KvEventPublisher(loop_, same, *other), Exception);
}

TEST_F(KvEventSocketsTest, ASubscriberKnowsWhetherAnybodyTells) {
  subscribe(KvEventSubscriber::Options{path("events"), path("ask")});
  EXPECT_FALSE(subscriber_->is_connected());
  start();
  EXPECT_TRUE(run_until([this] { return subscriber_->is_connected(); }));
  stop();
  EXPECT_TRUE(run_until([this] { return !subscriber_->is_connected(); }));
  start();
  EXPECT_TRUE(run_until([this] { return subscriber_->is_connected(); }));
}

}  // namespace
}  // namespace kvferry::ipc
