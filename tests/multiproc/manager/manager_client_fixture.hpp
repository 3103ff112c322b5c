// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/client.hpp"
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::test {

inline constexpr ipc::GroupId kMain{0};
inline constexpr ipc::GroupId kState{1};  ///< Its rule: the last block alone.

/// A manager with a real client of the engine beside the scripted one, of the same identity.
class ManagerClientTest : public ManagerTest {
 protected:
  void connect_engine() {
    worker::ClientOptions options;
    options.runtime_dir = dir_.string();
    options.engine = "chat";
    options.ranks = 2;
    const ipc::EngineHello hello = client_hello();
    options.identity.model = hello.model;
    options.identity.weights = hello.weights;
    options.identity.fingerprint = hello.fingerprint;
    auto engine = worker::Client::connect(options, soon());
    ASSERT_TRUE(engine.has_value()) << engine.error().to_string();
    engine_ = std::move(engine).value();
    ASSERT_TRUE(engine_->wait_ready(true, soon()).has_value());
  }
  static std::vector<ipc::Digest> keys(std::uint64_t count) {
    std::vector<ipc::Digest> all;
    for (std::uint64_t i = 1; i <= count; ++i) all.push_back(key(i));
    return all;
  }
  /// Both groups' blocks of keys first to last, of one prefix, in one job.
  void store_prefix(std::uint64_t first, std::uint64_t last) {
    std::vector<ipc::StoreKey> wanted;
    for (std::uint64_t i = first; i <= last; ++i) {
      for (const ipc::GroupId group : {kMain, kState}) {
        wanted.push_back({group, key(i), i == 1 ? ipc::Digest{} : key(i - 1)});
      }
    }
    std::vector<ipc::StoreItem> items;
    for (const std::uint64_t slot : reserve(wanted)) {
      const ipc::StoreKey& of = wanted[items.size()];
      items.push_back({of.group, ipc::BlockId{static_cast<std::uint32_t>(items.size())}, slot});
    }
    submit_store(next_job_++, items);
    ASSERT_NO_FATAL_FAILURE(movers_finish());
    EXPECT_THAT(wait_done().results, testing::Each(0));
  }

  std::unique_ptr<worker::Client> engine_;
};

}  // namespace kvferry::test
