// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/store_messages.hpp"
#include "multiproc/manager/scripted_peer.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::test {

/// A real manager in a child process, with scripted peers in this one.
class ManagerTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// Starts the manager; true once it answers.
  void start_manager(std::chrono::milliseconds job_deadline = std::chrono::seconds(30));
  [[nodiscard]] std::unique_ptr<ScriptedPeer> peer(ipc::ProcessKind kind, const std::string& name);
  [[nodiscard]] ChildProcess peer_child(const std::string& kind,
                                        std::uint32_t rank,
                                        std::uint32_t ranks = 2);

  /// Workers and movers of both ranks, mapped at epoch 1, and a client that knows the generation.
  void start_engine();
  void add_worker(std::uint32_t rank);
  void add_mover(std::uint32_t rank);
  /// Answers, as the rank's worker, that it works for no other mover than the one that has come.
  void settle(std::uint32_t rank);
  static void settle(ScriptedPeer& worker);
  void connect_client();
  [[nodiscard]] static ipc::EngineHello client_hello(std::uint32_t ranks = 2);
  /// Waits for the client's state event that satisfies both.
  [[nodiscard]] bool wait_state(ipc::CachePhase phase, bool offload_ready);

  [[nodiscard]] std::vector<std::uint64_t> reserve(const std::vector<ipc::StoreKey>& keys);
  void submit_store(std::uint64_t job, const std::vector<ipc::StoreItem>& items);
  void submit_load(std::uint64_t job, const std::vector<ipc::LoadItem>& items);
  [[nodiscard]] ipc::JobDone wait_done();
  /// Stores the key from that block on both ranks.
  void store(std::uint64_t key, std::uint32_t block, std::uint32_t group = 0);
  /// Takes the next job of every mover and answers it as done.
  void movers_finish();
  [[nodiscard]] ipc::LookupReply lookup(const std::vector<std::uint64_t>& keys);
  [[nodiscard]] nlohmann::json status();
  /// Answers the next clear that each worker and mover gets; fails the given rank's worker.
  void answer_clears(std::uint64_t epoch, std::optional<std::uint32_t> failing = {});

  [[nodiscard]] static ipc::Digest key(std::uint64_t value) {
    return ipc::Digest::from_words(0xB10C, value);
  }
  [[nodiscard]] static std::uint8_t code(ipc::ErrorCode error) {
    return static_cast<std::uint8_t>(error);
  }

  std::filesystem::path dir_;
  std::optional<ChildProcess> manager_;
  std::vector<std::unique_ptr<ScriptedPeer>> workers_{2};
  std::vector<std::unique_ptr<ScriptedPeer>> movers_{2};
  std::unique_ptr<ScriptedPeer> client_;
  std::unique_ptr<ScriptedPeer> operator_;
  ipc::EngineState state_;
  std::uint64_t next_job_ = 1000;
  // In the next manager.
  std::uint32_t max_jobs_ = 1024;  ///< Of an engine.
  std::uint64_t pool_bytes_ = 4ULL << 20U;
  std::string verify_loads_ = "sampled";  ///< Or always.
  std::chrono::milliseconds late_sums_deadline_ = std::chrono::seconds(60);
};

}  // namespace kvferry::test
