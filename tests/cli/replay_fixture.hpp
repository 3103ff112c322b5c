// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/process.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::test {

/// A finished command.
struct Finished {
  std::optional<ChildExit> exit;
  std::string output;      ///< stdout.
  std::string complaints;  ///< stderr.
};

/// Runs the kvferry program to its end.
Finished run_kvferry(const std::vector<std::string>& arguments);

/// A folder of its own for each test: traces, reports, runtime directories.
class ReplayTest : public testing::Test {
 protected:
  ReplayTest();
  ~ReplayTest() override;

  /// Sessions whose turns come `sessions` requests apart, each turn two blocks longer than the
  /// last: with few device blocks, all but the first blocks come back from host memory. One request
  /// every gap_ms.
  std::string write_trace(int requests, int sessions = 30, int gap_ms = 0);
  [[nodiscard]] std::string path(const std::string& name) const {
    return (folder_ / name).string();
  }
  [[nodiscard]] nlohmann::json report() const;

  /// Arguments of a replay in this folder that writes report().
  [[nodiscard]] std::vector<std::string> replay_arguments(
      const std::string& trace, const std::vector<std::string>& more = {}) const;
  /// Plays to the end.
  Finished replay(const std::string& trace, const std::vector<std::string>& more = {});

  /// Starts a replay and returns once blocks are being stored.
  void start_replay(const std::string& trace, const std::vector<std::string>& more = {});
  /// Waits for its end; adds it to the test's failures when it hangs.
  std::optional<ChildExit> finish_replay(std::chrono::seconds limit = std::chrono::seconds(60));
  /// The runtime directory of the running replay, for other commands.
  [[nodiscard]] std::vector<std::string> instance_options() const;
  /// Status JSON of the running replay, or of another command's instance; null while nobody
  /// answers.
  [[nodiscard]] nlohmann::json status(const std::string& instance = "replay") const;
  /// Running children: name ("mover/0", "export-weights/v0") to process.
  [[nodiscard]] std::map<std::string, ipc::ProcessRef> children() const;
  /// Waits until the condition holds or the replay ends; false then.
  bool wait_until(const std::function<bool()>& condition);

  std::filesystem::path folder_;
  std::optional<ChildProcess> running_;
};

}  // namespace kvferry::test
