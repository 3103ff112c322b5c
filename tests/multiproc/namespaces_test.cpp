// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Tenants of one manager: what each may have, and what none learns of another. All processes are
// real; this one is the tenants' engines.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/worker/client.hpp"
#include "support/child_process.hpp"
#include "support/manager_status.hpp"
#include "support/prefix_hashes.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::ErrorCode;
using ipc::GroupId;
using std::chrono_literals::operator""ms;
using worker::Presence;
using worker::Reservation;

constexpr std::uint64_t kBlock = 32ULL << 10;  ///< Of geometry tiny.
constexpr std::uint64_t kPool = 128 * kBlock;
constexpr std::uint32_t kBatch = 8;  ///< Device blocks of a tenant.

/// How room for blocks is asked for: before they are stored, or with the store itself.
enum class Way : std::uint8_t { kReserved, kOffered };

/// A client of the engine in a namespace.
class TenantClient {
 public:
  TenantClient(const std::string& runtime_dir,
               std::string name,
               std::uint32_t place,
               std::optional<Digest> key,
               Way way)
      : name_(std::move(name)), first_block_(place * kBatch), way_(way) {
    const ipc::Geometry geometry = ipc::load_geometry("tiny", 1).value();
    options_.runtime_dir = runtime_dir;
    options_.identity.name_space = name_;
    options_.identity.model = geometry.name;
    options_.identity.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
    options_.identity.weights = Digest::from_words(1, 1);
    options_.identity.name_space_key = key;
  }
  [[nodiscard]] ipc::Status connect() {
    KVFERRY_ASSIGN(client_, worker::Client::connect(options_, test::soon()));
    return client_->wait_ready(true, test::soon());
  }
  /// Stores what is missing of a prefix, a batch at a time. @return blocks for which there was room
  std::size_t store(const std::vector<Digest>& hashes,
                    std::optional<ipc::Retention> retention = {}) {
    std::size_t stored = 0;
    for (std::size_t first = 0; first < hashes.size(); first += kBatch) {
      std::vector<worker::StoreTarget> targets;
      for (std::size_t i = first; i < std::min(hashes.size(), first + kBatch); ++i) {
        targets.push_back({GroupId{0}, hashes[i], i == 0 ? Digest{} : hashes[i - 1], retention});
      }
      stored += way_ == Way::kOffered ? store_offered(targets) : store_reserved(targets);
    }
    return stored;
  }
  /// Prefixes of one batch each that nobody asks for again.
  std::size_t flood(std::size_t batches) {
    std::size_t stored = 0;
    for (std::size_t i = 0; i < batches; ++i) {
      stored += store(test::prefix_hashes(std::hash<std::string>{}(name_) + ++next_, kBatch));
    }
    return stored;
  }
  void load(const std::vector<Digest>& hashes) {
    std::vector<worker::LoadItem> items;
    for (const Digest& hash : hashes) {
      const auto block = first_block_ + static_cast<std::uint32_t>(items.size());
      items.push_back({GroupId{0}, BlockId{block}, hash});
    }
    expect_done(client_->submit_load(items, 1));
  }
  [[nodiscard]] std::uint32_t usable(const std::vector<Digest>& hashes) {
    const auto match = client_->match_prefix(hashes);
    EXPECT_TRUE(match.has_value()) << match.error().to_string();
    return match ? match->usable : 0;
  }
  [[nodiscard]] nlohmann::json status() {
    const auto json = client_->status(test::soon());
    EXPECT_TRUE(json.has_value());
    return json ? nlohmann::json::parse(*json) : nlohmann::json();
  }
  [[nodiscard]] nlohmann::json account(const std::string& name) {
    const nlohmann::json all = status();
    for (const nlohmann::json& one : all["namespaces"]) {
      if (one["name"] == name) return one;
    }
    ADD_FAILURE() << "no namespace " << name;
    return {};
  }
  [[nodiscard]] nlohmann::json account() { return account(name_); }
  [[nodiscard]] worker::Client& client() { return *client_; }

 private:
  std::size_t store_reserved(const std::vector<worker::StoreTarget>& targets) {
    const auto slots = client_->reserve_store(targets, test::soon());
    EXPECT_TRUE(slots.has_value()) << slots.error().to_string();
    std::vector<worker::StoreItem> items;
    for (const worker::StoreSlot& slot : slots.value_or(std::vector<worker::StoreSlot>{})) {
      if (slot.outcome != Reservation::kReserved) continue;
      const auto block = first_block_ + static_cast<std::uint32_t>(items.size());
      items.push_back({GroupId{0}, BlockId{block}, slot.slot});
    }
    if (!items.empty()) expect_done(client_->submit_store(items));
    return items.size();
  }
  std::size_t store_offered(const std::vector<worker::StoreTarget>& targets) {
    std::vector<worker::StoreItem> items;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      items.push_back({GroupId{0}, BlockId{first_block_ + static_cast<std::uint32_t>(i)}, i});
    }
    std::size_t stored = 0;
    for (const std::uint8_t result : wait(client_->offer_store(targets, items)).results) {
      EXPECT_THAT(static_cast<ErrorCode>(result),
                  testing::AnyOf(ErrorCode{}, ErrorCode::kAlreadyExists, ErrorCode::kNoHostMemory));
      stored += result == 0 ? 1U : 0U;
    }
    return stored;
  }
  worker::Completion wait(const ipc::Result<ipc::JobId>& job) {
    EXPECT_TRUE(job.has_value()) << job.error().to_string();
    if (!job) return {};
    const auto done = client_->wait(std::vector{*job}, test::soon());
    EXPECT_TRUE(done.has_value()) << done.error().to_string();
    return done && !done->empty() ? done->front() : worker::Completion{};
  }
  void expect_done(const ipc::Result<ipc::JobId>& job) {
    const worker::Completion done = wait(job);
    EXPECT_TRUE(done.all_ok() && !done.results.empty()) << done.message;
  }

  const std::string name_;
  const std::uint32_t first_block_;
  const Way way_;
  worker::ClientOptions options_;
  std::unique_ptr<worker::Client> client_;
  std::uint64_t next_ = 0;
};

class NamespacesTest : public testing::Test {
 protected:
  void start(std::vector<std::string> manager_arguments = {}) {
    manager_arguments.insert(manager_arguments.begin(),
                             {"manager", fmt::format("--host-memory={}", kPool)});
    processes_.push_back(run(std::move(manager_arguments)));
    for (const char* command : {"worker", "mover"}) {
      processes_.push_back(run({command, "--geometry=tiny", "--gpu-blocks=64",
                                "--device=host:" + temp_.path().filename().string() + ":16MiB"}));
    }
  }
  [[nodiscard]] TenantClient tenant(const std::string& name, std::optional<Digest> key = {}) {
    TenantClient made(temp_.path().string(), name, places_++, key, way_);
    const ipc::Status ready = made.connect();
    EXPECT_TRUE(ready.has_value()) << ready.error().to_string();
    return made;
  }
  test::ChildProcess run(std::vector<std::string> arguments) {
    return test::ChildProcess({.program = KVFERRY_PROGRAM,
                               .arguments = std::move(arguments),
                               .environment = {"KVFERRY_RUNTIME_DIR=" + temp_.path().string()}});
  }

  const test::ShortTempDir temp_;
  std::vector<test::ChildProcess> processes_;
  std::uint32_t places_ = 0;
  Way way_ = Way::kReserved;
};

class NamespaceLimitsTest : public NamespacesTest, public testing::WithParamInterface<Way> {
 protected:
  NamespaceLimitsTest() { way_ = GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Ways,
                         NamespaceLimitsTest,
                         testing::Values(Way::kReserved, Way::kOffered),
                         [](const auto& way) {
                           return way.param == Way::kOffered ? "offered" : "reserved";
                         });

TEST_P(NamespaceLimitsTest, ATenantThatFloodsTakesNothingOfAnothersShareAndStaysUnderItsLimit) {
  start({"--namespace-quota=quiet=25%:50%,loud=25%:75%"});
  TenantClient quiet = tenant("quiet");
  TenantClient loud = tenant("loud");
  const std::vector<Digest> kept = test::prefix_hashes(1, 32);  // all of its share
  ASSERT_EQ(quiet.store(kept), 32U);
  EXPECT_EQ(loud.flood(40), 320U) << "it evicts what it stored itself";
  EXPECT_EQ(quiet.usable(kept), 32U);
  quiet.load({kept.begin(), kept.begin() + kBatch});
  const nlohmann::json of_quiet = loud.account("quiet");
  EXPECT_EQ(of_quiet["bytes"], 32 * kBlock);
  EXPECT_EQ(of_quiet["blocks"], 32);
  EXPECT_EQ(of_quiet["evicted"], 0);
  EXPECT_EQ(of_quiet["hits"], kBatch);
  EXPECT_EQ(of_quiet["stored"], 32);
  EXPECT_EQ(of_quiet["soft_bytes"], kPool / 4);
  EXPECT_EQ(of_quiet["hard_bytes"], kPool / 2);
  const nlohmann::json of_loud = loud.account();
  EXPECT_EQ(of_loud["bytes"], kPool / 4 * 3);
  EXPECT_EQ(of_loud["evicted"], 320 - 96);
  EXPECT_EQ(of_loud["evicted_for_others"], 0);
  // What is not used of it others may have, until it is wanted.
  EXPECT_EQ(quiet.store(test::prefix_hashes(2, 32)), 32U);
  EXPECT_EQ(quiet.account()["bytes"], kPool / 2);
  EXPECT_EQ(quiet.account("loud")["evicted_for_others"], 32);
}

TEST_P(NamespaceLimitsTest, SequencesCountAndWhatIsBeyondTheLimitIsRefused) {
  start({"--namespace-quota=small=0:12.5%"});  // 16 blocks
  TenantClient small = tenant("small");
  const auto swap_out = [&](std::uint64_t sequence) {
    std::vector<worker::SequenceItem> items;
    for (std::uint32_t i = 0; i < kBatch; ++i) items.push_back({GroupId{0}, BlockId{i}, i});
    const auto job = small.client().swap_out(sequence, items);
    EXPECT_TRUE(job.has_value());
    const auto done = small.client().wait(std::vector{job.value()}, test::soon());
    EXPECT_TRUE(done.has_value());
    return done->front();
  };
  ASSERT_EQ(small.flood(2), 16U);
  EXPECT_TRUE(swap_out(1).all_ok()) << "prefix blocks make room";
  EXPECT_TRUE(swap_out(2).all_ok());
  const worker::Completion refused = swap_out(3);
  EXPECT_THAT(refused.results, testing::Each(static_cast<std::uint8_t>(ErrorCode::kNoHostMemory)));
  EXPECT_THAT(refused.message, testing::HasSubstr("namespace small has 512.0 KiB"));
  EXPECT_THAT(refused.message, testing::HasSubstr("hard limit of 512.0 KiB"));
  EXPECT_EQ(small.store(test::prefix_hashes(9, 1)), 0U);
  const nlohmann::json account = small.account();
  EXPECT_EQ(account["bytes"], 16 * kBlock);
  EXPECT_EQ(account["sequence_blocks"], 16);
  EXPECT_EQ(account["refused_quota"], 2);
  ASSERT_TRUE(small.client().drop_sequence(1, test::soon()).has_value());
  EXPECT_EQ(small.store(test::prefix_hashes(9, 8)), 8U);
}

TEST_F(NamespacesTest, WhoHasNoKeyFindsNothingByCallsNorInTheTable) {
  const Digest key = Digest::random();
  start();
  TenantClient secret = tenant("secret", key);
  // Whoever knows the tokens has them.
  const std::vector<Digest> hashes = test::prefix_hashes(1, kBatch);
  ASSERT_EQ(secret.store(hashes), kBatch);
  EXPECT_EQ(secret.usable(hashes), kBatch);
  // In its name, without its key.
  for (const std::optional<Digest>& wrong : {std::optional<Digest>(), {Digest::random()}}) {
    TenantClient stranger(temp_.path().string(), "secret", 1, wrong, way_);
    const ipc::Status refused = stranger.connect();
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kPermission) << refused.error().to_string();
  }
  // In another name, with whatever key: the same model, weights and tokens.
  for (const std::optional<Digest>& any : {std::optional<Digest>(), {key}, {Digest::random()}}) {
    TenantClient other = tenant(fmt::format("other{}", places_), any);
    EXPECT_EQ(other.usable(hashes), 0U);
    EXPECT_EQ(other.client().presence(GroupId{0}, hashes[0]), Presence::kMiss);
    const auto looked = other.client().lookup(hashes, test::soon());
    ASSERT_TRUE(looked.has_value());
    EXPECT_EQ(looked->usable_prefix, 0U);
    EXPECT_THAT(looked->presence.at(0), testing::Each(Presence::kMiss));
    EXPECT_EQ(other.client().pin(hashes, test::soon()).value_or(99), 0U);
    EXPECT_EQ(other.store({hashes[0]}), 1U) << "not told that it is there already";
  }
  TenantClient partner = tenant("secret", key);
  EXPECT_EQ(partner.usable(hashes), kBatch);
  partner.load(hashes);
}

TEST_F(NamespacesTest, APrefixStaysThatIsStoredWithAPriority) {
  start();
  TenantClient one = tenant("one");
  const std::vector<Digest> system = test::prefix_hashes(1, kBatch);
  const std::vector<Digest> others = test::prefix_hashes(2, kBatch);
  ASSERT_EQ(one.store(system, ipc::Retention{80, std::chrono::hours(1)}), kBatch);
  ASSERT_EQ(one.store(others, ipc::Retention{80, 1ms}), kBatch);
  one.flood(40);
  EXPECT_EQ(one.usable(system), kBatch);
  EXPECT_EQ(one.usable(others), 0U) << "its time is over";
  EXPECT_EQ(one.status()["index"]["retained"], kBatch);
  const auto refused = one.client().reserve_store(
      std::vector<worker::StoreTarget>{
          {GroupId{0}, test::prefix_hashes(3, 1)[0], {}, ipc::Retention{101}}},
      test::soon());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
}

TEST_F(NamespacesTest, BlocksGoAheadOfNeed) {
  start({"--evict-ahead=10:20"});
  TenantClient one = tenant("one");
  one.flood(40);
  // It may have stopped anywhere between the marks.
  ASSERT_TRUE(test::wait_status(temp_.path().string(), processes_[0], [](const auto& status) {
    return status["pool"]["free"].template get<std::uint64_t>() >= kPool / 10;
  }));
  const nlohmann::json status = one.status();
  EXPECT_GT(status["index"]["evicted_ahead"], 0);
  EXPECT_LT(status["pool"]["free"].get<std::uint64_t>(), kPool / 4) << "and not more than that";
}

}  // namespace
}  // namespace kvferry
