// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "multiproc/worker_setup.hpp"
#include "service_thread.hpp"
#include "support/child_process.hpp"
#include "support/instance_checks.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

/// The manager as a worker and its mover see it: takes their hellos, states and answers, sends them
/// requests. Lives on the thread of its loop; what tests wait for is behind the mutex.
class RankManager final : public ipc::ControlHandler {
 public:
  struct Pool {
    int fd = -1;
    std::uint64_t bytes = 0;
  };
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<ipc::RankState> state;             ///< The worker's last one.
    std::optional<ipc::RankState> mover_state;       ///< The mover's last one.
    std::map<std::uint64_t, ipc::Envelope> replies;  ///< By request id.
    std::vector<ipc::MoverJobDone> answers;          ///< As they came.
  };

  RankManager(ipc::EventLoop& loop, const ipc::RuntimeDir& dir, Shared& shared, Pool pool)
      : shared_(shared), server_(loop, options(dir, pool), *this) {}

  void on_peer(const ipc::Peer& peer) override {
    (peer.kind == ipc::ProcessKind::kMover ? mover_ : worker_) = peer.id;
  }
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override {
    if (envelope.kind == ipc::MessageKind::kRankHello) {
      (void)server_.reply(peer.id, envelope, ipc::Empty{});
      return;
    }
    const std::lock_guard lock(shared_.mutex);
    if (envelope.kind == ipc::MessageKind::kRankState) {
      auto& state = peer.kind == ipc::ProcessKind::kMover ? shared_.mover_state : shared_.state;
      state = ipc::decode<ipc::RankState>(envelope.body, "state").value();
    } else if (envelope.kind == ipc::MessageKind::kMoverJobDone) {
      shared_.answers.push_back(ipc::decode<ipc::MoverJobDone>(envelope.body, "answer").value());
    } else if (envelope.is_reply) {
      const std::uint64_t id = envelope.request.value;
      shared_.replies[id] = std::move(envelope);
    }
    shared_.changed.notify_all();
  }
  void on_peer_silent(const ipc::Peer& /*peer*/) override {}
  void on_peer_died(const ipc::Peer& /*peer*/) override {}

  void send(ipc::ProcessKind to, const ipc::Envelope& envelope) {
    (void)server_.send(to == ipc::ProcessKind::kMover ? mover_ : worker_, envelope);
  }

 private:
  static ipc::ControlServer::Options options(const ipc::RuntimeDir& dir, Pool pool) {
    ipc::ControlServer::Options options;
    options.registry_path = dir.registry_socket();
    options.control_path = dir.control_socket();
    options.session = ipc::SessionId::random();
    options.pool_fd = pool.fd;
    options.pool_bytes = pool.bytes;
    return options;
  }

  Shared& shared_;
  ipc::IncarnationId worker_;
  ipc::IncarnationId mover_;
  ipc::ControlServer server_;
};

/// A real worker process on a simulated device of its own, with a manager and a step channel.
class WorkerFixture : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kMiB = 1ULL << 20;

  void TearDown() override {
    for (const std::string& breach : find_breaches(dir_)) ADD_FAILURE() << breach;
  }
  void start_manager() {
    manager_ = std::make_unique<worker::ServiceThread<RankManager>>(
        "manager",
        [this](ipc::EventLoop& loop) {
          return std::make_unique<RankManager>(loop, dir_, shared_, pool_);
        },
        [] {});
  }
  void start_worker(const std::string& owner = "worker", const std::string& handles = "vmm") {
    worker_.emplace(
        ChildOptions{.program = sibling_program(worker_program_),
                     .arguments = {temp_.path().string(), device_text_, owner, handles}});
  }
  /// The worker's state once it fits; the test fails when it never does.
  ipc::RankState wait_state(const std::function<bool(const ipc::RankState&)>& fits) {
    std::unique_lock lock(shared_.mutex);
    const bool found = shared_.changed.wait_until(
        lock, soon().when(), [&] { return shared_.state.has_value() && fits(*shared_.state); });
    EXPECT_TRUE(found) << "worker says: " << (worker_ ? worker_->stderr_text() : "");
    return shared_.state.value_or(ipc::RankState{});
  }
  ipc::RankState wait_mapped(std::uint64_t epoch = 1) {
    return wait_state([epoch](const ipc::RankState& state) {
      return state.mapped && state.epoch.value >= epoch;
    });
  }
  /// Everything from manager, worker to a connected step channel.
  void start_all(const std::string& handles = "vmm") {
    start_manager();
    start_worker("worker", handles);
    arena_ = wait_mapped();
    connect_steps();
  }
  void connect_steps() {
    ipc::ControlLink::Options options;
    options.registry_path = dir_.rank_socket(kEngine, 0, "step");
    options.control_path = dir_.rank_socket(kEngine, 0, "stepctl");
    options.kind = ipc::ProcessKind::kEngine;
    options.incarnation = ipc::IncarnationId::random();
    options.name = "test engine";
    auto link = ipc::ControlLink::connect(options, soon());
    ASSERT_TRUE(link.has_value()) << link.error().to_string();
    steps_ = std::move(link).value();
    ASSERT_TRUE(
        steps_->call<ipc::Empty>(ipc::MessageKind::kStepHello, ipc::Empty{}, soon()).has_value());
  }
  /// Sends a message as the manager; its request id.
  template <typename Body>
  std::uint64_t tell(ipc::ProcessKind to, ipc::MessageKind kind, const Body& body) {
    ipc::Envelope envelope;
    envelope.kind = kind;
    envelope.request = ipc::RequestId{++last_request_};
    envelope.body = ipc::encode(body);
    manager_->post([to, envelope](RankManager& manager) { manager.send(to, envelope); });
    return envelope.request.value;
  }
  /// Sends a request as the manager and waits for its reply.
  template <typename Request>
  ipc::Envelope ask(ipc::MessageKind kind,
                    const Request& request,
                    ipc::ProcessKind to = ipc::ProcessKind::kWorker) {
    return wait_reply(tell(to, kind, request));
  }
  /// To what was told.
  ipc::Envelope wait_reply(std::uint64_t id) {
    std::unique_lock lock(shared_.mutex);
    EXPECT_TRUE(shared_.changed.wait_until(lock, soon().when(),
                                           [&] { return shared_.replies.contains(id); }));
    return shared_.replies[id];
  }
  [[nodiscard]] ipc::Step make_step() const {
    ipc::Step step;
    step.session = arena_.session;
    step.epoch = arena_.epoch;
    return step;
  }
  ipc::Result<ipc::StepReply> run(const ipc::Step& step) {
    return steps_->call<ipc::StepReply>(ipc::MessageKind::kStep, step, soon());
  }
  ipc::StepReply run_ok(const ipc::Step& step) {
    auto reply = run(step);
    EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
    return reply ? *reply : ipc::StepReply{};
  }
  static std::vector<ipc::SeededItem> seeded(std::uint32_t first,
                                             std::uint32_t count,
                                             std::uint64_t seed,
                                             std::uint32_t group = 0) {
    std::vector<ipc::SeededItem> items;
    for (std::uint32_t i = 0; i < count; ++i) {
      items.push_back({ipc::GroupId{group}, ipc::BlockId{first + i}, seed + i});
    }
    return items;
  }
  [[nodiscard]] std::uint64_t device_used() const {
    return ipc::host_device_used_bytes(device_name_).value();
  }
  /// Names that the worker left in the runtime directory.
  [[nodiscard]] std::vector<std::string> worker_names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
      const std::string name = entry.path().filename();
      if (name.starts_with(kEngine)) names.push_back(name);
    }
    return names;
  }

  static std::string make_device_name() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name = fmt::format("m-{}-{}", ::getpid(), test->name()).substr(0, 64);
    std::replace(name.begin(), name.end(), '/', '-');
    return name;
  }

  const std::string device_name_ = make_device_name();
  const std::string device_text_ = fmt::format("host:{}:64MiB", device_name_);
  ShortTempDir temp_;
  ipc::RuntimeDir dir_ = ipc::RuntimeDir::open(temp_.path().string(), "default").value();
  std::string worker_program_ = "kvferry_worker_child";
  RankManager::Pool pool_;
  RankManager::Shared shared_;
  std::unique_ptr<worker::ServiceThread<RankManager>> manager_;
  std::uint64_t last_request_ = 0;
  std::optional<ChildProcess> worker_;
  std::unique_ptr<ipc::ControlLink> steps_;
  ipc::RankState arena_;
};

}  // namespace kvferry::test
