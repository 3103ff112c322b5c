// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "worker/scripted_manager.hpp"

#include <gtest/gtest.h>

#include <memory>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""s;

// Workers outlive engines, and refuse what is older than what they have seen.
TEST(ClientTicketsTest, LayerTicketsGrowOverClientsOfOneTimeAndOfOneAfterTheOther) {
  const test::ShortTempDir temp;
  const auto dir = ipc::RuntimeDir::open(temp.path().string(), "default").value();
  const test::ManagerThread manager(dir, [](test::ScriptedManager&) {});
  ClientOptions options;
  options.runtime_dir = temp.path().string();
  options.engine = "chat";
  const auto beside = Client::connect(options, Deadline::after(20s)).value();
  std::uint64_t last = 0;
  for (int life = 0; life < 3; ++life) {
    const auto client = Client::connect(options, Deadline::after(20s)).value();
    for (std::uint32_t i = 0; i < 100; ++i) {
      const LayerTicket ticket = client->layer_ticket(i % 2);
      EXPECT_EQ(ticket.slot, i % 2);
      ASSERT_GT(ticket.use, last);
      last = ticket.use;
    }
  }
  EXPECT_GT(beside->layer_ticket(1).use, last) << "it has not heard of them";
}

}  // namespace
}  // namespace kvferry::worker
