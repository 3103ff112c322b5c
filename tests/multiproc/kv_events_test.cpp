// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a router learns from KV events is what an engine finds: manager, worker and mover are real
// processes, this one is the engine and the router.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/kv_event_subscriber.hpp"
#include "kvferry/worker/client.hpp"
#include "support/child_process.hpp"
#include "support/kv_picture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::GroupId;
using std::chrono_literals::operator""ms;
using test::KvPicture;
using worker::Presence;
using Kind = ipc::KvEventSubscriber::News::Kind;

constexpr std::uint32_t kGpuBlocks = 64;
constexpr const char* kGeometry = "tiny-window";  // two groups

class KvEventsProcessTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    manager_.emplace(
        start({"manager", "--host-memory=2MiB", "--kv-events=" + endpoint("events"),
               "--kv-events-snapshot=" + endpoint("ask"), "--kv-events-encoding=" + GetParam()}));
    worker_.emplace(start(rank("worker")));
    mover_.emplace(start(rank("mover")));
    connect();
  }
  void TearDown() override {
    if (HasFailure() && manager_) (void)std::fputs(manager_->stderr_text().c_str(), stderr);
    if (client_ != nullptr) loop_.unwatch(client_->fd());
    client_.reset();
  }

  [[nodiscard]] std::string endpoint(const std::string& name) const {
    return "ipc://" + (temp_.path() / name).string();
  }
  [[nodiscard]] test::ChildProcess start(std::vector<std::string> arguments) const {
    return test::ChildProcess({.program = KVFERRY_PROGRAM,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }
  [[nodiscard]] std::vector<std::string> rank(const std::string& command) const {
    return {command, fmt::format("--geometry={}", kGeometry),
            fmt::format("--gpu-blocks={}", kGpuBlocks),
            fmt::format("--device=host:{}:64MiB", temp_.path().filename().string())};
  }
  bool run_until(const std::function<bool()>& done) {
    const ipc::Deadline deadline = test::soon();
    while (!deadline.expired()) {
      if (done()) return true;
      loop_.run_once(deadline.earlier(ipc::Deadline::after(1ms)));
      if (subscriber_) take_news();
    }
    return false;
  }
  void take_news() {
    const auto news = subscriber_->next(ipc::Deadline::after(1ms));
    ASSERT_TRUE(news.has_value()) << news.error().to_string();
    if (*news) picture_.apply(**news);
  }
  void connect() {
    const ipc::Geometry geometry = ipc::load_geometry(kGeometry, 1).value();
    groups_ = static_cast<std::uint32_t>(geometry.groups.size());
    worker::ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.identity.model = geometry.name;
    options.identity.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = Digest::from_words(1, 1);
    ASSERT_TRUE(run_until([&] {
      auto client = worker::Client::connect(options, ipc::Deadline::after(200ms));
      if (client) client_ = std::move(*client);
      return client_ != nullptr;
    }));
    loop_.watch(client_->fd(), [] {});
    const auto ready = client_->wait_ready(true, test::soon());
    ASSERT_TRUE(ready.has_value()) << ready.error().to_string();
  }
  void subscribe() {
    picture_ = {};
    subscriber_.emplace(ipc::KvEventSubscriber::Options{endpoint("events"), endpoint("ask")});
    ASSERT_TRUE(run_until([&] { return picture_.is_complete(); }));
  }
  /// The only one.
  [[nodiscard]] std::string topic() const {
    for (const auto& [name, blocks] : picture_.topics()) {
      if (!name.empty()) return name;
    }
    return {};
  }

  static Digest hash(std::uint32_t value) { return Digest::from_words(0xB10C, value); }
  /// Blocks [first, first + count) of every group, in one job, each behind the one before.
  void store(std::uint32_t first, std::uint32_t count) {
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t i = first; i < first + count; ++i) {
      for (std::uint32_t group = 0; group < groups_; ++group) {
        targets.push_back({GroupId{group}, hash(i), i == first ? Digest{} : hash(i - 1)});
      }
    }
    const auto slots = client_->reserve_store(targets, test::soon());
    ASSERT_TRUE(slots.has_value()) << slots.error().to_string();
    std::vector<worker::StoreItem> items;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      ASSERT_EQ(slots->at(i).outcome, worker::Reservation::kReserved);
      const auto block = static_cast<std::uint32_t>(i / groups_) % kGpuBlocks;
      items.push_back({targets[i].group, BlockId{block}, slots->at(i).slot});
    }
    const auto job = client_->submit_store(items);
    ASSERT_TRUE(job.has_value()) << job.error().to_string();
    std::optional<worker::Completion> done;
    ASSERT_TRUE(run_until([&] {
      for (worker::Completion& one : client_->poll(64)) {
        if (one.job == *job) done = std::move(one);
      }
      return done.has_value();
    }));
    EXPECT_TRUE(done->all_ok()) << done->message;
    most_ = std::max(most_, first + count);
  }
  /// What the engine finds of all that it ever stored.
  KvPicture::Blocks found() {
    std::vector<Digest> hashes;
    for (std::uint32_t i = 0; i < most_; ++i) hashes.push_back(hash(i));
    const auto reply = client_->lookup(hashes, test::soon());
    EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
    KvPicture::Blocks blocks;
    for (std::uint32_t group = 0; reply && group < groups_; ++group) {
      for (std::uint32_t i = 0; i < most_; ++i) {
        if (reply->presence.at(group).at(i) == Presence::kHit) blocks.emplace(group, hashes[i]);
      }
    }
    return blocks;
  }
  void expect_same() {
    const KvPicture::Blocks expected = found();
    EXPECT_TRUE(run_until([&] { return picture_.of(topic()) == expected; }))
        << picture_.of(topic()).size() << " blocks are told, " << expected.size() << " are found";
  }
  [[nodiscard]] nlohmann::json status() const {
    auto command = start({"status", "--json"});
    return nlohmann::json::parse(command.read_line(test::soon()).value_or("{}"), nullptr, false);
  }

  const test::ShortTempDir temp_;
  ipc::EventLoop loop_;
  std::optional<test::ChildProcess> manager_;
  std::optional<test::ChildProcess> worker_;
  std::optional<test::ChildProcess> mover_;
  std::unique_ptr<worker::Client> client_;
  std::optional<ipc::KvEventSubscriber> subscriber_;
  KvPicture picture_;
  std::uint32_t groups_ = 1;
  std::uint32_t most_ = 0;
};

TEST_P(KvEventsProcessTest, APictureIsWhatTheEngineFinds) {
  subscribe();
  store(0, 16);
  expect_same();
  EXPECT_EQ(picture_.of(topic()).size(), 16U * groups_);
  // More than host memory holds.
  for (std::uint32_t first = 16; first < 400; first += 16) store(first, 16);
  expect_same();
  EXPECT_LT(picture_.of(topic()).size(), std::size_t{most_} * groups_);
  EXPECT_GT(status()["index"]["evicted"], 0);
  // Who comes late knows the same.
  const KvPicture::Blocks known = picture_.of(topic());
  subscribe();
  EXPECT_EQ(picture_.of(topic()), known);
  EXPECT_GT(picture_.count(Kind::kSnapshot), 0U);
  // A clear that keeps host memory changes nothing, and one that drops it is one event.
  ASSERT_TRUE(client_->clear(worker::HostPolicy::kKeep, test::soon()).has_value());
  ASSERT_TRUE(client_->reinit(0, test::soon()).has_value());
  ASSERT_TRUE(client_->wait_ready(true, test::soon()).has_value());
  expect_same();
  EXPECT_EQ(picture_.clears(), 0U);
  ASSERT_TRUE(client_->clear(worker::HostPolicy::kDrop, test::soon()).has_value());
  ASSERT_TRUE(run_until([&] { return picture_.of(topic()).empty(); }));
  EXPECT_EQ(picture_.clears(), 1U);
  ASSERT_TRUE(client_->reinit(0, test::soon()).has_value());
  ASSERT_TRUE(client_->wait_ready(true, test::soon()).has_value());
  expect_same();
  store(400, 8);
  expect_same();
  const auto told = status()["kv_events"];
  EXPECT_EQ(told["batches"], subscriber_->expected().value_or(0)) << told.dump();
  EXPECT_EQ(told["dropped"], 0);
  EXPECT_GE(told["events"], told["batches"]);
}

TEST_P(KvEventsProcessTest, TheCommandPrintsTheSnapshotAndWhatFollows) {
  store(0, 3);
  auto command = start({"events", "--endpoint=" + endpoint("events"),
                        "--snapshot=" + endpoint("ask"), "--json", "--count=2"});
  const auto line = [&] {
    return nlohmann::json::parse(command.read_line(test::soon()).value_or("null"), nullptr, false);
  };
  EXPECT_EQ(line()["news"], "reset");
  const auto snapshot = line();
  EXPECT_EQ(snapshot["news"], "snapshot") << snapshot.dump();
  const auto topic = ipc::KvTopic::parse(snapshot.value("topic", ""));
  ASSERT_TRUE(topic.has_value()) << topic.error().to_string();
  EXPECT_EQ(topic->engine, "default");
  EXPECT_EQ(topic->name_space, "default");
  EXPECT_EQ(topic->model, kGeometry);
  ASSERT_EQ(snapshot["events"].size(), groups_);
  for (const auto& event : snapshot["events"]) {
    EXPECT_EQ(event["type"], "BlockStored");
    EXPECT_EQ(event["block_size"], 16);
    EXPECT_EQ(event["block_hashes"],
              (std::vector<std::string>{hash(0).hex(), hash(1).hex(), hash(2).hex()}));
  }
  EXPECT_EQ(line()["news"], "complete");
  store(3, 1);
  const auto live = line();
  EXPECT_EQ(live["sequence"], 1) << live.dump();
  EXPECT_EQ(live["events"][1]["kv_cache_spec_sliding_window"], 64) << live.dump();
  EXPECT_EQ(command.wait(test::soon()), test::ChildExit::exited(0));
}

// What a process was killed in the middle of keeps nobody from the endpoints.
TEST_P(KvEventsProcessTest, ASecondManagerAtTheEndpointsIsRefusedAndOneAfterAKillIsNot) {
  subscribe();
  store(0, 4);
  expect_same();
  auto second = start({"manager", "--instance=second", "--kv-events=" + endpoint("events")});
  EXPECT_EQ(second.wait(test::soon()), test::ChildExit::exited(1)) << second.stderr_text();
  EXPECT_THAT(second.stderr_text(), testing::HasSubstr("already_exists"));
  store(4, 4);
  expect_same();
  manager_->kill();
  ASSERT_TRUE(manager_->wait(test::soon()).has_value());
  manager_.emplace(start({"manager", "--host-memory=2MiB", "--kv-events=" + endpoint("events"),
                          "--kv-events-snapshot=" + endpoint("ask")}));
  // Its host tier is empty.
  EXPECT_TRUE(run_until([&] { return picture_.is_complete() && picture_.of(topic()).empty(); }));
}

INSTANTIATE_TEST_SUITE_P(Encodings,
                         KvEventsProcessTest,
                         testing::Values("maps", "arrays"),
                         [](const auto& encoding) { return encoding.param; });

}  // namespace
}  // namespace kvferry
