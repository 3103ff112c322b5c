// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>
#include <unistd.h>

#include <optional>
#include <string>

namespace kvferry::test {
namespace {

using ipc::ErrorCode;
using ipc::MessageKind;
using testing::ElementsAre;
using testing::HasSubstr;

/// What a clear is for when the manager does not know of all that there is.
class ManagerClearScopeTest : public ManagerTest {
 protected:
  struct Answer {
    ipc::ClearReply reply;
    std::optional<ipc::Error> error;
  };

  void TearDown() override {
    owner_.reset();
    instance_.reset();
    ManagerTest::TearDown();
  }
  /// Holds the name that the owner of a rank's memory holds.
  void own(const std::string& engine, std::uint32_t rank) {
    instance_.emplace(ipc::RuntimeDir::open(dir_.string(), "default").value());
    owner_.emplace(ipc::NameLock::acquire(instance_->rank_socket(engine, rank, "lease")).value());
  }
  Answer take_clear() {
    Answer answer;
    const auto envelope = operator_->next(MessageKind::kClear);
    EXPECT_TRUE(envelope.has_value()) << "no answer";
    if (!envelope) return answer;
    answer.error = envelope->error;
    if (!envelope->body.empty()) {
      answer.reply = ipc::decode<ipc::ClearReply>(envelope->body, "ClearReply").value();
    }
    return answer;
  }
  Answer clear(const std::string& engine = {}) {
    operator_->ask(MessageKind::kClear, ipc::ClearRequest{engine});
    return take_clear();
  }
  static void expect_unknown(const Answer& answer, const std::string& engine, std::uint32_t rank) {
    ASSERT_TRUE(answer.error.has_value()) << "called done while an owner holds memory";
    EXPECT_EQ(answer.error->code, ErrorCode::kNotReady) << answer.error->to_string();
    EXPECT_THAT(answer.error->message, HasSubstr("engine " + engine));
    EXPECT_THAT(answer.error->message, HasSubstr("pid " + std::to_string(::getpid())));
    ASSERT_FALSE(answer.reply.ranks.empty());
    EXPECT_EQ(answer.reply.ranks[0].engine, engine);
    EXPECT_EQ(answer.reply.ranks[0].rank.value, rank);
    EXPECT_TRUE(answer.reply.ranks[0].error.has_value());
  }

  std::optional<ipc::RuntimeDir> instance_;
  std::optional<ipc::NameLock> owner_;
};

// Such as after a manager's restart, before anybody has found the new one.
TEST_F(ManagerClearScopeTest, OwnersThatHaveNotRegisteredAreNotPassedOver) {
  start_manager();
  EXPECT_FALSE(clear().error.has_value()) << "there is nobody";
  own("a.b", 3);
  expect_unknown(clear(), "a.b", 3);
  expect_unknown(clear("a.b"), "a.b", 3);
  EXPECT_EQ(clear("other").error->code, ErrorCode::kNotFound);
  owner_.reset();
  const Answer after = clear();
  EXPECT_FALSE(after.error.has_value()) << after.error->to_string();
  EXPECT_TRUE(after.reply.ranks.empty());
}

TEST_F(ManagerClearScopeTest, EnginesThatAreKnownAreClearedBesideOneThatIsNot) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  own("other", 0);
  operator_->ask(MessageKind::kClear, ipc::ClearRequest{});
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  const Answer answer = take_clear();
  expect_unknown(answer, "other", 0);
  ASSERT_EQ(answer.reply.ranks.size(), 3U);
  for (const std::size_t known : {1U, 2U}) {
    EXPECT_EQ(answer.reply.ranks[known].engine, "chat");
    EXPECT_FALSE(answer.reply.ranks[known].error.has_value());
  }
}

TEST_F(ManagerClearScopeTest, ReinitOfNobodyIsNotReady) {
  start_manager();
  const auto reinit = operator_->call<ipc::ReinitReply>(MessageKind::kReinit, ipc::ReinitRequest{});
  ASSERT_FALSE(reinit.has_value());
  EXPECT_EQ(reinit.error().code, ErrorCode::kNotReady) << reinit.error().to_string();
}

// Their blocks would be found by whoever comes with the same model next.
TEST_F(ManagerClearScopeTest, PrefixesOfEnginesThatHaveLeftAreDropped) {
  for (const char* named : {"", "chat"}) {
    start_manager();
    {
      std::vector<ChildProcess> ranks;
      for (const char* kind : {"worker", "copier"}) {
        ranks.push_back(peer_child(kind, 0, 1));
        ASSERT_TRUE(ranks.back().wait_line("ready", soon())) << ranks.back().stderr_text();
      }
      client_ = peer(ipc::ProcessKind::kEngine, "engine");
      const auto seen = client_->call<ipc::EngineState>(MessageKind::kEngineHello, client_hello(1));
      ASSERT_TRUE(seen.has_value()) << seen.error().to_string();
      state_ = *seen;
      ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
      const ipc::StoreKey stored{ipc::GroupId{0}, key(1), {}};
      const std::uint64_t reservation = reserve({stored}).at(0);
      submit_store(1, {{ipc::GroupId{0}, ipc::BlockId{1}, reservation}});
      ASSERT_THAT(wait_done().results, ElementsAre(0));
      client_.reset();
      for (ChildProcess& rank : ranks) rank.kill();
    }
    const ipc::Deadline deadline = soon();
    while (!status()["engines"].empty() && !deadline.expired()) {
      // Each round is an answer of the manager.
    }
    ASSERT_TRUE(status()["engines"].empty()) << "somebody is left";
    const Answer first = clear(named);
    ASSERT_FALSE(first.error.has_value()) << first.error->to_string();
    EXPECT_EQ(first.reply.host_blocks_dropped, 1U) << "clear of '" << named << "'";
    EXPECT_EQ(clear().reply.host_blocks_dropped, 0U);
    EXPECT_EQ(clear("chat").error->code, ErrorCode::kNotFound) << "nothing of it is left";
    operator_.reset();
    manager_->signal(SIGTERM);
    ASSERT_EQ(manager_->wait(soon()), ChildExit::exited(0));
    manager_.reset();
  }
}

}  // namespace
}  // namespace kvferry::test
