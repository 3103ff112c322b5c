// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "support/lease_geometry.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <string>

namespace kvferry::ipc {
namespace {

class NoUser final : public ArenaUser {
 public:
  Status on_mapped(SessionId /*session*/, Arena& /*arena*/, ArenaContents /*contents*/) override {
    return ok();
  }
  Status quiesce(Epoch /*epoch*/, Deadline /*deadline*/) override { return ok(); }
  void on_unmapped(Epoch /*epoch*/) override {}
};

// A mover told to end while it waits for an epoch would else stay for as long as the one who asked
// for the re-init allowed: up to ten minutes.
TEST(LeaseAttacherTest, AProcessThatEndsWaitsForNoEpoch) {
  std::string base = "/tmp/kvf-XXXXXX";
  ASSERT_NE(::mkdtemp(base.data()), nullptr);
  {
    auto dir = RuntimeDir::open(base, "waits");
    ASSERT_TRUE(dir.has_value()) << dir.error().to_string();
    auto spec = DeviceSpec::parse(fmt::format("host:attacher-wait-{}:16MiB", ::getpid()));
    ASSERT_TRUE(spec.has_value());
    const std::unique_ptr<Device> device = open_device(*spec);
    const Geometry geometry = test::small_geometry(1, 1);
    LeaseOptions options;
    options.identity.instance = "waits";
    options.identity.engine = "engine";
    options.identity.self = ProcessKind::kMover;
    options.identity.incarnation = Digest::random();
    NoUser user;
    LeaseAttacher attacher(options, *dir, *device, geometry, user, nullptr);
    auto waiting = std::async(std::launch::async, [&attacher] {
      return attacher.wait_mapped(Epoch{1}, Deadline::after(std::chrono::minutes(10)));
    });
    attacher.cancel_waits();
    const Status present = waiting.get();
    ASSERT_FALSE(present.has_value());
    EXPECT_EQ(present.error().code, ErrorCode::kCancelled);
    const Status later = attacher.wait_mapped(Epoch{1}, Deadline::after(std::chrono::minutes(10)));
    ASSERT_FALSE(later.has_value());
    EXPECT_EQ(later.error().code, ErrorCode::kCancelled);
  }
  std::filesystem::remove_all(base);
}

}  // namespace
}  // namespace kvferry::ipc
