// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A child that an engine forks has copies of its objects and shares its descriptors.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/registration.hpp"
#include "support/lease_geometry.hpp"
#include "support/region_source.hpp"
#include "worker/host_device.hpp"
#include "worker/scripted_manager.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>

namespace kvferry::worker {
namespace {

using ipc::Envelope;
using ipc::Epoch;
using ipc::MessageKind;
using std::chrono_literals::operator""s;
using test::ManagerThread;
using test::ScriptedManager;

constexpr std::uint64_t kMiB = 1ULL << 20;

/// Runs the body in a forked child; its exit code, which is what the body returns. Nothing when it
/// does not end.
std::optional<int> in_forked_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  const auto process = ipc::ProcessRef::of_pid(child);
  if (!process) return std::nullopt;
  const bool ended = process->wait_death(Deadline::after(20s));
  if (!ended) (void)process->signal(SIGKILL);
  int status = 0;
  (void)::waitpid(child, &status, 0);
  if (!ended || !WIFEXITED(status)) return std::nullopt;
  return WEXITSTATUS(status);
}

class ForkedChildTest : public ::testing::Test {
 protected:
  std::unique_ptr<Client> connect() {
    manager_.emplace(dir_, [](ScriptedManager& manager) {
      manager.state.generation = 7;
      manager.state.phase = ipc::CachePhase::kReady;
      manager.state.offload_ready = true;
      manager.state.ranks.push_back(
          {ipc::SessionId::from_words(3, 3), Epoch{7}, ipc::LeaseId{1}, {}});
      manager.state.group_blocks = {64};
    });
    ClientOptions options;
    options.runtime_dir = temp_.path().string();
    options.engine = "chat";
    options.identity.model = "m";
    auto client = Client::connect(options, Deadline::after(20s));
    EXPECT_TRUE(client.has_value()) << client.error().to_string();
    EXPECT_TRUE((*client)->wait_ready(true, Deadline::after(20s)));
    return *std::move(client);
  }
  JobId submit(Client& client) {
    const std::vector<LoadItem> items{{GroupId{0}, BlockId{1}, Digest::from_words(1, 1)}};
    return client.submit_load(items, 1).value();
  }

  test::ShortTempDir temp_;
  ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  std::optional<ManagerThread> manager_;
};

TEST_F(ForkedChildTest, HasNoPartInItsParentsClient) {
  auto client = connect();
  const JobId job = submit(*client);
  // Over before the fork, and taken in by the parent alone.
  const JobId early = submit(*client);
  manager_->run([&](ScriptedManager& manager) { manager.send_done(early, {0}); });
  pollfd news{client->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&news, 1, 20'000), 1);
  EXPECT_TRUE(client->wait_ready(true, Deadline::after(20s)));
  EXPECT_EQ(in_forked_child([&] {
              const auto cancelled = [](const auto& result) {
                return !result && result.error().code == ErrorCode::kCancelled &&
                       result.error().message.find("forked") != std::string::npos;
              };
              if (!cancelled(client->status(Deadline::after(5s)))) return 1;
              if (!cancelled(client->clear(HostPolicy::kKeep, Deadline::after(5s)))) return 2;
              if (!cancelled(client->wait_ready(true, Deadline::after(5s)))) return 3;
              if (client->wait(std::vector{job}, Deadline::after(5s)).has_value()) return 4;
              if (!client->poll(10).empty()) return 5;
              if (client->wait(std::vector{early}, Deadline::after(5s)).has_value()) return 7;
              if (client->state().manager_connected) return 6;
              client->close();
              client.reset();
              return 0;
            }),
            0);
  // What the parent had is as it was: completions, link, epoll set, job.
  EXPECT_EQ(client->poll(10).size(), 1U);
  manager_->run([&](ScriptedManager& manager) { manager.send_done(job, {0}); });
  pollfd entry{client->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 20'000), 1) << "the client's descriptor hears of nothing any more";
  const auto done = client->wait(std::vector{job}, Deadline::after(20s));
  ASSERT_TRUE(done.has_value()) << done.error().to_string();
  EXPECT_TRUE(done->at(0).all_ok());
  EXPECT_TRUE(client->state().manager_connected);
  manager_->run([](ScriptedManager& manager) { EXPECT_EQ(manager.count(MessageKind::kBye), 0U); });
}

TEST_F(ForkedChildTest, ConnectsAClientOfItsOwn) {
  const auto client = connect();
  EXPECT_EQ(in_forked_child([&] {
              ClientOptions options;
              options.runtime_dir = temp_.path().string();
              options.engine = "chat";
              options.identity.model = "m";
              const auto own = Client::connect(options, Deadline::after(20s));
              return own && (*own)->wait_ready(true, Deadline::after(20s)) ? 0 : 1;
            }),
            0);
  EXPECT_TRUE(client->wait_ready(true, Deadline::after(20s)));
}

// A shared lock on the directory belongs to the open file, which the child has, too.
TEST_F(ForkedChildTest, LeavesTheInstancesDirectoryToItsParent) {
  auto held = std::make_unique<ipc::RuntimeDir>(dir_);
  std::filesystem::create_directory(dir_.transitions_folder());
  EXPECT_EQ(in_forked_child([&] {
              held.reset();
              dir_ = ipc::RuntimeDir::find(temp_.path().string(), "default").value();
              return 0;
            }),
            0);
  EXPECT_TRUE(std::filesystem::exists(dir_.transitions_folder()));
  // Still held by the parent: the last of two others does not remove it either.
  { const auto other = ipc::RuntimeDir::open(temp_.path().string(), "default"); }
  EXPECT_TRUE(std::filesystem::exists(dir_.path()));
}

TEST_F(ForkedChildTest, LeavesAWorkersArenaAndNamesToItsParent) {
  ipc::RankConfig identity;
  identity.runtime_dir = temp_.path().string();
  identity.geometry = test::small_geometry(2, 1);
  identity.arena.gpu_blocks = 64;
  identity.arena.staging_slot_bytes = 16'384;
  identity.arena.staging_slots = 2;
  const auto device = test::open_host_device(64 * kMiB);
  test::RegionSource source{*device, ipc::HandleKind::kVmm, 4};
  auto worker = register_worker(*device, identity, source);
  ASSERT_TRUE(worker.has_value()) << worker.error().to_string();
  EXPECT_EQ(in_forked_child([&] {
              (*worker)->close();
              worker->reset();
              return 0;
            }),
            0);
  EXPECT_EQ((*worker)->view().phase, ipc::LeasePhase::kReady);
  EXPECT_TRUE((*worker)->enter().has_value());
  EXPECT_EQ(source.release_count(1), 0);
  EXPECT_TRUE(std::filesystem::exists(dir_.rank_socket(identity.engine, 0, "lease")));
  (*worker)->close();
  EXPECT_EQ(source.release_count(1), 1);
}

}  // namespace
}  // namespace kvferry::worker
