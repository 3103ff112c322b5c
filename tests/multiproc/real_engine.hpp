// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "support/child_process.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

inline bool run_until(ipc::EventLoop& loop, const std::function<bool()>& done) {
  const ipc::Deadline deadline = soon();
  while (!done() && !deadline.expired()) {
    loop.run_once(deadline.earlier(ipc::Deadline::after(std::chrono::milliseconds(20))));
  }
  return done();
}

/// This process as an engine, with a worker and a mover of its only rank that are real processes.
/// @threading the loop's thread
class RealEngine {
 public:
  using Start = std::function<ChildProcess(std::vector<std::string>)>;
  struct Setup {
    std::string name = "default";
    std::string geometry = "tiny";
    std::uint32_t arena_blocks = 160;
    std::uint32_t unit_blocks = 1;
    bool is_block_first = false;
    ipc::Digest weights = ipc::Digest::from_words(7, 7);
  };

  RealEngine(ipc::EventLoop& loop, Setup setup, std::string runtime_dir)
      : loop_(loop), setup_(std::move(setup)), runtime_dir_(std::move(runtime_dir)) {}

  void start(const Start& start, const std::string& device) {
    start_worker(start, device);
    start_mover(start, device);
  }
  void start_worker(const Start& start, const std::string& device) {
    worker_.emplace(start(rank("worker", device)));
  }
  void start_mover(const Start& start, const std::string& device) {
    mover_.emplace(start(rank("mover", device)));
  }
  void connect() {
    const ipc::Geometry geometry = ipc::load_geometry(setup_.geometry, 1).value();
    groups_ = static_cast<std::uint32_t>(geometry.groups.size());
    worker::ClientOptions options;
    options.runtime_dir = runtime_dir_;
    options.engine = setup_.name;
    options.identity.model = geometry.name;
    options.identity.fingerprint = geometry.fingerprint(
        setup_.is_block_first ? ipc::ArenaOrder::kBlockFirst : ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = setup_.weights;
    options.identity.unit_blocks = setup_.unit_blocks;
    ASSERT_TRUE(run_until(loop_, [&] {
      auto client =
          worker::Client::connect(options, ipc::Deadline::after(std::chrono::milliseconds(200)));
      if (!client) return false;
      client_ = std::move(*client);
      return true;
    }));
    loop_.watch(client_->fd(), [] {});
    const auto ready = client_->wait_ready(true, soon());
    ASSERT_TRUE(ready.has_value()) << ready.error().to_string();
    channel_.emplace(loop_, ipc::RuntimeDir::open(runtime_dir_, "default").value(), setup_.name,
                     ipc::Rank{0}, "test", worker::StepChannel::Hooks{[] {}, [] {}});
    ASSERT_TRUE(run_until(loop_, [&] { return channel_->is_up(); }));
  }
  void close() {
    if (client_ != nullptr) loop_.unwatch(client_->fd());
    channel_.reset();
    client_.reset();
  }
  [[nodiscard]] worker::Client& client() { return *client_; }
  [[nodiscard]] ChildProcess& worker() { return *worker_; }
  [[nodiscard]] ChildProcess& mover() { return *mover_; }
  [[nodiscard]] std::uint32_t groups() const { return groups_; }

  /// Whether a group's block, by its place from 0 on, is one.
  using Wanted = std::function<bool(std::uint32_t group, std::uint32_t place)>;
  /// Writes what the seeds say into device blocks [at, at + count) of every group, where block i
  /// has first_seed + i, or compares it, of those that are wanted; returns how many words were
  /// others.
  std::uint64_t step(
      bool fills,
      std::uint64_t first_seed,
      std::uint32_t count,
      std::uint32_t at,
      const Wanted& wanted = [](std::uint32_t, std::uint32_t) { return true; }) {
    ipc::Step step;
    step.session = client_->state().ranks.at(0).session;
    step.epoch = client_->state().ranks.at(0).epoch;
    auto& items = fills ? step.fills : step.verifies;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < count; ++i) {
        if (!wanted(group, i)) continue;
        items.push_back({ipc::GroupId{group}, ipc::BlockId{at + i},
                         first_seed + i + std::uint64_t{group} * 1'000'000});
      }
    }
    std::optional<ipc::Result<ipc::StepReply>> reply;
    const auto sent = channel_->send(
        step, [&reply](ipc::Result<ipc::StepReply> answer) { reply = std::move(answer); });
    EXPECT_TRUE(sent.has_value());
    EXPECT_TRUE(run_until(loop_, [&] { return reply.has_value(); }));
    EXPECT_TRUE(reply && reply->has_value());
    std::uint64_t wrong = 0;
    for (const std::uint64_t words : (*reply)->mismatches) wrong += words;
    return wrong;
  }
  [[nodiscard]] std::optional<worker::Completion> completion(ipc::JobId job) {
    for (worker::Completion& done : client_->poll(64)) completions_.push_back(std::move(done));
    const auto found =
        std::find_if(completions_.begin(), completions_.end(),
                     [job](const worker::Completion& done) { return done.job == job; });
    return found == completions_.end() ? std::nullopt : std::optional(*found);
  }
  [[nodiscard]] worker::Completion await(ipc::JobId job) {
    EXPECT_TRUE(run_until(loop_, [&] { return completion(job).has_value(); }));
    return completion(job).value_or(worker::Completion{});
  }

 private:
  [[nodiscard]] std::vector<std::string> rank(const std::string& command,
                                              const std::string& device) const {
    return {command, "--engine=" + setup_.name, "--geometry=" + setup_.geometry,
            fmt::format("--gpu-blocks={}", setup_.arena_blocks), "--device=" + device};
  }

  ipc::EventLoop& loop_;
  const Setup setup_;
  const std::string runtime_dir_;
  std::uint32_t groups_ = 0;
  std::optional<ChildProcess> worker_;
  std::optional<ChildProcess> mover_;
  std::unique_ptr<worker::Client> client_;
  std::optional<worker::StepChannel> channel_;
  std::vector<worker::Completion> completions_;
};

}  // namespace kvferry::test
