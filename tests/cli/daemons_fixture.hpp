// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/replay_fixture.hpp"
#include "ipc/os/temp_dir.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

/// Manager, mover and worker as an operator starts them, and the commands that talk to them.
class DaemonsTest : public testing::Test {
 protected:
  [[nodiscard]] std::vector<std::string> common(std::string command) const {
    return {std::move(command), "--runtime-dir=" + (temp_ / "run").string(), "--instance=chat"};
  }
  [[nodiscard]] Finished ask(const std::string& command,
                             const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = common(command);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_kvferry(arguments);
  }
  ChildProcess& start(const std::string& command, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = common(command);
    if (command != "manager") {
      arguments.push_back("--geometry=" + geometry_);
      arguments.push_back("--gpu-blocks=" + std::to_string(gpu_blocks_));
      arguments.push_back("--device=" + device_for(more));
    } else {
      arguments.push_back("--host-memory=" + host_memory_);
    }
    arguments.insert(arguments.end(), more.begin(), more.end());
    running_.push_back(std::make_unique<ChildProcess>(
        ChildOptions{.program = KVFERRY_PROGRAM, .arguments = arguments}));
    return *running_.back();
  }
  /// Asks for the status until it says so.
  bool wait_status(const std::function<bool(const nlohmann::json&)>& condition) const {
    constexpr int kLookAgain = 20;  // Milliseconds.
    const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(60));
    while (!deadline.expired()) {
      const Finished asked = ask("status", {"--json"});
      const auto status = nlohmann::json::parse(asked.output, nullptr, false);
      if (status.is_object() && condition(status)) return true;
      pollfd end{running_.front()->pidfd(), POLLIN, 0};
      if (::poll(&end, 1, kLookAgain) != 0) return false;
    }
    return false;
  }
  /// Of a process with these options: that of its rank, when each has one of its own.
  [[nodiscard]] std::string device_for(const std::vector<std::string>& options) const {
    constexpr std::string_view kRank = "--rank=";
    for (const std::string& option : options) {
      if (own_devices_ && option.starts_with(kRank)) {
        return "host:" + device_name_ + "-" + option.substr(kRank.size()) + ":" + device_size_;
      }
    }
    return device();
  }
  [[nodiscard]] std::string device() const { return "host:" + device_name_ + ":" + device_size_; }
  static bool offload_ready(const nlohmann::json& status) {
    return status["engines"].size() == 1 && status["engines"][0]["offload_ready"] == true;
  }

  const ShortTempDir temp_;
  /// Not that of tests that run beside this one: a name is a device for all processes of the
  /// machine.
  const std::string device_name_ = "d" + std::to_string(::getpid());
  std::string device_size_ = "64MiB";
  bool own_devices_ = false;  ///< Each rank has one.
  std::string geometry_ = "tiny";
  int gpu_blocks_ = 32;
  std::string host_memory_ = "16MiB";
  std::vector<std::unique_ptr<ChildProcess>> running_;
};

}  // namespace kvferry::test
