// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/device.hpp"

#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

TEST(DeviceSpecTest, ParsesBothKinds) {
  const auto cuda = DeviceSpec::parse("cuda:7");
  ASSERT_TRUE(cuda.has_value());
  EXPECT_EQ(cuda->kind, DeviceKind::kCuda);
  EXPECT_EQ(cuda->ordinal, 7);
  const auto host = DeviceSpec::parse("host:demo-0_x.y:2GiB");
  ASSERT_TRUE(host.has_value());
  EXPECT_EQ(host->kind, DeviceKind::kHost);
  EXPECT_EQ(host->host_name, "demo-0_x.y");
  EXPECT_EQ(host->host_capacity_bytes, 2ULL << 30);
}

TEST(DeviceSpecTest, TextRoundTripsExactly) {
  for (const char* text : {"cuda:0", "cuda:1023", "host:a:1", "host:a:1025", "host:a:3KiB",
                           "host:a:1536MiB", "host:b.c:2GiB", "host:b:1TiB"}) {
    const auto spec = DeviceSpec::parse(text);
    ASSERT_TRUE(spec.has_value()) << text;
    EXPECT_EQ(spec->to_string(), text);
  }
  EXPECT_EQ(DeviceSpec::parse("host:a:1.5 GiB")->to_string(), "host:a:1536MiB");
}

TEST(DeviceSpecTest, RefusesWhatIsNoDevice) {
  const std::string long_name = "host:" + std::string(65, 'n') + ":1GiB";
  for (const std::string_view text : {"",
                                      "cuda",
                                      "cuda:",
                                      "cuda:-1",
                                      "cuda:+1",
                                      "cuda: 1",
                                      "cuda:1x",
                                      "cuda:0x1",
                                      "cuda:1024",
                                      "cuda:99999999999999",
                                      "CUDA:0",
                                      "gpu:0",
                                      "host",
                                      "host:",
                                      "host:a",
                                      "host::1GiB",
                                      "host:a:",
                                      "host:a:0",
                                      "host:a:-1GiB",
                                      "host:a/b:1GiB",
                                      "host:a b:1GiB",
                                      "host:a:1GiB:x",
                                      "host:a:lots",
                                      "host:a:2000000TiB",
                                      "host:\xc3\xa4:1GiB",
                                      long_name.c_str()}) {
    const auto spec = DeviceSpec::parse(text);
    ASSERT_FALSE(spec.has_value()) << text;
    EXPECT_EQ(spec.error().code, ErrorCode::kInvalidArgument) << text;
    EXPECT_FALSE(spec.error().message.empty());
  }
}

TEST(DeviceSpecTest, OpeningChecksAHandMadeSpec) {
  DeviceSpec spec;
  spec.host_name = "bad/name";
  spec.host_capacity_bytes = 1 << 20;
  EXPECT_THROW((void)open_device(spec), Exception);
  spec.host_name = "good";
  spec.host_capacity_bytes = 0;
  EXPECT_THROW((void)open_device(spec), Exception);
}

TEST(DeviceSpecTest, NamesItsEnumerators) {
  EXPECT_EQ(to_string(DeviceKind::kHost), "host");
  EXPECT_EQ(to_string(DeviceKind::kCuda), "cuda");
  EXPECT_EQ(to_string(HandleKind::kLegacy), "legacy");
  EXPECT_EQ(to_string(HandleKind::kVmm), "vmm");
}

}  // namespace
}  // namespace kvferry::ipc
