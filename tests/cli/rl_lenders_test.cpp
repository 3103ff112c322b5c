// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "rl/lenders.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::uint64_t kMiB = 1ULL << 20;

std::vector<ipc::DeviceSpec> devices(const std::vector<std::string>& texts) {
  std::vector<ipc::DeviceSpec> specs;
  for (const std::string& text : texts) specs.push_back(ipc::DeviceSpec::parse(text).value());
  return specs;
}

std::vector<std::string> planned(const std::vector<std::string>& texts,
                                 std::vector<WeightsVersion>& weights) {
  std::vector<std::string> lines;
  for (const LenderPlan& lender : plan_lenders(weights, devices(texts))) {
    lines.push_back(lender.name + " " + lender.file.string() + " " + lender.device.to_string());
  }
  return lines;
}

TEST(LendersTest, RanksOfOneDeviceShareALenderOfEachVersion) {
  std::vector<WeightsVersion> weights{{"/a", {}}, {"/b", {}}};
  EXPECT_THAT(planned({"cuda:1", "cuda:1"}, weights), ElementsAre("v0 /a cuda:1", "v1 /b cuda:1"));
  EXPECT_EQ(weights[0].lender, "v0");
  EXPECT_EQ(weights[1].lender, "v1");
}

TEST(LendersTest, RanksOfSeveralDevicesHaveOneEach) {
  std::vector<WeightsVersion> weights{{"/a", {}}, {"/b", {}}};
  EXPECT_THAT(
      planned({"cuda:0", "cuda:2"}, weights),
      ElementsAre("v0-r0 /a cuda:0", "v0-r1 /a cuda:2", "v1-r0 /b cuda:0", "v1-r1 /b cuda:2"));
  EXPECT_EQ(weights[1].lender, "v1-r{rank}");
}

TEST(LendersTest, TheFullestDeviceIsCounted) {
  EXPECT_EQ(lenders_on_fullest(devices({"cuda:0"})), kWeightsVersions);
  EXPECT_EQ(lenders_on_fullest(devices({"cuda:0", "cuda:0", "cuda:0"})), kWeightsVersions);
  EXPECT_EQ(lenders_on_fullest(devices({"cuda:0", "cuda:1"})), kWeightsVersions);
  EXPECT_EQ(lenders_on_fullest(devices({"cuda:0", "cuda:1", "cuda:0"})), 2 * kWeightsVersions);
}

TEST(LendersTest, WhatEachTakesIsAllOfItsTensorsInWholeAllocations) {
  EXPECT_EQ(lent_bytes(1, 1), 2 * kMiB) << "the least that a device gives";
  const std::uint64_t large = lent_bytes(64 * kMiB, 2);
  EXPECT_GE(large, 64 * kMiB);
  EXPECT_LE(large, 66 * kMiB);
  EXPECT_EQ(large % (2 * kMiB), 0U);
}

TEST(LendersTest, WhoDoesNotListenIsMissing) {
  const test::ShortTempDir temp;
  const auto dir = ipc::RuntimeDir::open(temp.path().string(), "rl");
  ASSERT_TRUE(dir);
  EXPECT_THAT(missing_lenders(*dir, {}), IsEmpty());
  EXPECT_THAT(missing_lenders(*dir, {"v0", "v1"}), ElementsAre("v0", "v1"));
  const auto listener = ipc::PacketListener::listen(dir->weights_socket("v1").value());
  ASSERT_TRUE(listener);
  EXPECT_THAT(missing_lenders(*dir, {"v0", "v1"}), ElementsAre("v0"));
}

}  // namespace
}  // namespace kvferry::cli
