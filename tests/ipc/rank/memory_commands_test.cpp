// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/memory_commands.hpp"

#include "ipc/os/temp_dir.hpp"
#include "ipc/rank/no_arena_user.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace kvferry::ipc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

/// Notes what it is told about a backup.
class NotingMemory final : public MemoryUser {
 public:
  Result<std::uint64_t> release(MemoryTag /*tag*/,
                                WeightsBackup backup,
                                Deadline /*deadline*/) override {
    backups.push_back(backup);
    return 1000;
  }
  Result<std::uint64_t> resume(MemoryTag /*tag*/, Deadline /*deadline*/) override { return 1000; }

  std::vector<WeightsBackup> backups;
};

class MemoryCommandsTest : public testing::Test {
 protected:
  /// Releases the tag, and takes it back.
  void cycle(MemoryTag tag, WeightsBackup backup) {
    run(MessageKind::kRankRelease, RankRelease{{tag}, backup, /*empty=*/false});
    run(MessageKind::kRankResume, RankResume{{tag}});
  }
  template <typename Order> void run(MessageKind kind, const Order& order) {
    Envelope request;
    request.kind = kind;
    request.body = encode(order);
    const auto done = commands_.run(request);
    EXPECT_FALSE(done.reply.error.has_value()) << done.reply.error->to_string();
  }

  const kvferry::test::ShortTempDir temp_;
  const RuntimeDir dir_ = RuntimeDir::open(temp_.path().string(), "test").value();
  const std::unique_ptr<Device> device_ = kvferry::test::open_host_device(64ULL << 20);
  NoArenaUser user_;
  const EmptyingUser allocator_{user_, nullptr};
  WeightsCommands weights_{nullptr, Digest{}, dir_, Rank{0}};
  NotingMemory memory_;
  MemoryCommands commands_{&memory_, allocator_, weights_, *device_};
};

TEST_F(MemoryCommandsTest, LostWeightsAreReleasedWithoutABackupAndItSaysSo) {
  cycle(MemoryTag::kWeights, WeightsBackup::kHost);
  cycle(MemoryTag::kWeights, WeightsBackup::kNone);
  EXPECT_TRUE(weights_.lost());
  testing::internal::CaptureStderr();
  init_logging("test", LogLevel::kInfo);
  cycle(MemoryTag::kWeights, WeightsBackup::kHost);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("release: no backup of weights that were lost before"));
  EXPECT_TRUE(weights_.lost()) << "until the next commit";
  cycle(MemoryTag::kScratch, WeightsBackup::kHost);
  EXPECT_THAT(memory_.backups, ElementsAre(WeightsBackup::kHost, WeightsBackup::kNone,
                                           WeightsBackup::kNone, WeightsBackup::kHost));
}

}  // namespace
}  // namespace kvferry::ipc
