// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/components.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::Deadline;
using ipc::EmptyReason;
using ipc::ErrorCode;
using std::chrono_literals::operator""s;
using testing::AllOf;
using testing::HasSubstr;

constexpr std::uint64_t kMiB = 1ULL << 20;

/// Holds a buffer, and gives up what it is told to keep the rest of.
class Buffers final : public Component {
 public:
  Buffers(CachingAllocator& allocator, std::uint64_t size_bytes) : allocator_(allocator) {
    use(size_bytes);
  }
  void use(std::uint64_t size_bytes) {
    first_ = std::move(allocator_.allocate(size_bytes)).value();
    second_ = std::move(allocator_.allocate(kMiB)).value();
  }
  [[nodiscard]] std::uint64_t device_bytes() const override {
    return first_.size_bytes() + second_.size_bytes();
  }
  [[nodiscard]] ipc::Result<std::uint64_t> give_up(Deadline /*deadline*/) override {
    if (fails) return KVFERRY_ERROR(kTimeout, "it is in use");
    first_ = {};
    if (!keeps_some) second_ = {};
    return device_bytes();
  }

  bool fails = false;
  bool keeps_some = false;

 private:
  CachingAllocator& allocator_;
  ScratchBuffer first_;
  ScratchBuffer second_;
};

class ComponentRegistryTest : public testing::Test {
 protected:
  ipc::ComponentRelease release(const std::string& name) {
    testing::internal::CaptureStderr();
    ipc::init_logging("test", ipc::LogLevel::kInfo);
    auto released = registry_.release(name, Deadline::after(20s));
    said_ = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(released.has_value()) << released.error().to_string();
    return released ? *released : ipc::ComponentRelease{};
  }
  [[nodiscard]] std::uint64_t empties() const {
    return allocator_.stats().empties_because(EmptyReason::kComponent);
  }

  const std::unique_ptr<ipc::Device> device_ = test::open_host_device(256 * kMiB);
  CachingAllocator allocator_{*device_};
  ComponentRegistry registry_{
      [this](EmptyReason reason) { return allocator_.empty_cache(reason); }};
  std::string said_;
};

TEST_F(ComponentRegistryTest, ALargeComponentWhoseStorageIsGoneEmptiesTheAllocator) {
  Buffers draft(allocator_, 8 * kMiB);
  ASSERT_TRUE(registry_.add({"draft_cache", ComponentStrategy::kOffloaded, true}, draft));
  ipc::ComponentRelease released = release("draft_cache");
  EXPECT_EQ(released.device_bytes_before, 9 * kMiB);
  EXPECT_EQ(released.component.device_bytes, 0U);
  EXPECT_TRUE(released.emptied);
  EXPECT_GT(released.reserved_before, 9 * kMiB - 1);
  EXPECT_EQ(released.reserved_after, 0U);
  EXPECT_EQ(test::device_used_bytes(), 0U) << "the driver has it";
  EXPECT_EQ(empties(), 1U);
  EXPECT_THAT(said_, AllOf(HasSubstr("component draft_cache (offloaded): 9.00 MiB -> 0 B"),
                           HasSubstr("large release (its storage is gone): allocator emptied"),
                           HasSubstr("reserved ")));
  // Again: there is nothing, so nothing is emptied.
  EXPECT_FALSE(release("draft_cache").emptied);
  EXPECT_THAT(said_, HasSubstr("there was nothing"));
  draft.use(8 * kMiB);
  EXPECT_TRUE(release("draft_cache").emptied);
  EXPECT_EQ(empties(), 2U);
}

TEST_F(ComponentRegistryTest, ASmallOneAndOneThatKeepsSomeLeaveTheAllocatorAsItIs) {
  Buffers small(allocator_, 8 * kMiB);
  Buffers keeps(allocator_, 8 * kMiB);
  keeps.keeps_some = true;
  ASSERT_TRUE(registry_.add({"small", ComponentStrategy::kOffloaded, false}, small));
  ASSERT_TRUE(registry_.add({"keeps", ComponentStrategy::kOffloaded, true}, keeps));
  EXPECT_EQ(release("small").component.device_bytes, 0U);
  EXPECT_THAT(said_, HasSubstr("not memory-intensive: allocator not emptied"));
  EXPECT_EQ(release("keeps").component.device_bytes, kMiB);
  EXPECT_THAT(said_, HasSubstr("some of it is still there: allocator not emptied"));
  EXPECT_EQ(empties(), 0U);
  EXPECT_GT(allocator_.stats().reserved_bytes, 8 * kMiB) << "it is cached";
}

TEST_F(ComponentRegistryTest, LayerByLayerEmptiesWheneverItEndsItsUseAndResidentNever) {
  Buffers layers(allocator_, 8 * kMiB);
  layers.keeps_some = true;
  Buffers stays(allocator_, 8 * kMiB);
  ASSERT_TRUE(registry_.add({"layers", ComponentStrategy::kLayerwise, true}, layers));
  ASSERT_TRUE(registry_.add({"small-layers", ComponentStrategy::kLayerwise, false}, layers));
  ASSERT_TRUE(registry_.add({"stays", ComponentStrategy::kResident, true}, stays));
  EXPECT_TRUE(release("layers").emptied);
  EXPECT_THAT(said_, HasSubstr("large release (layer by layer)"));
  EXPECT_FALSE(release("small-layers").emptied);
  const ipc::ComponentRelease kept = release("stays");
  EXPECT_FALSE(kept.emptied);
  EXPECT_EQ(kept.component.device_bytes, 9 * kMiB);
  EXPECT_THAT(said_, HasSubstr("resident: it keeps it"));
  EXPECT_EQ(empties(), 1U);
}

TEST_F(ComponentRegistryTest, WhatFailsOrIsUnknownEmptiesNothing) {
  Buffers draft(allocator_, 8 * kMiB);
  draft.fails = true;
  ASSERT_TRUE(registry_.add({"draft", ComponentStrategy::kOffloaded, true}, draft));
  EXPECT_EQ(registry_.release("draft", Deadline::after(20s)).error().code, ErrorCode::kTimeout);
  EXPECT_EQ(registry_.release("other", Deadline::after(20s)).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(empties(), 0U);
  EXPECT_EQ(draft.device_bytes(), 9 * kMiB);
}

TEST_F(ComponentRegistryTest, AnAllocatorThatCannotBeEmptiedIsAnError) {
  ComponentRegistry broken([](EmptyReason) -> ipc::Result<ipc::EmptiedCache> {
    return KVFERRY_ERROR(kCuda, "the device is gone");
  });
  Buffers draft(allocator_, 8 * kMiB);
  ASSERT_TRUE(broken.add({"draft", ComponentStrategy::kOffloaded, true}, draft));
  testing::internal::CaptureStderr();
  ipc::init_logging("test", ipc::LogLevel::kInfo);
  const auto failed = broken.release("draft", Deadline::after(20s));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("W test component: the allocator was not emptied: "));
  EXPECT_EQ(failed.error().code, ErrorCode::kCuda);
  EXPECT_THAT(failed.error().message,
              HasSubstr("9.00 MiB -> 0 B on the device, which stay cached: the device is gone"));
  ComponentRegistry without(nullptr);
  draft.use(8 * kMiB);
  ASSERT_TRUE(without.add({"draft", ComponentStrategy::kOffloaded, true}, draft));
  EXPECT_FALSE(without.release("draft", Deadline::after(20s)).value().emptied);
}

TEST_F(ComponentRegistryTest, NamesAreOnceAndReadable) {
  Buffers draft(allocator_, kMiB);
  ASSERT_TRUE(registry_.add({"draft", ComponentStrategy::kOffloaded, true}, draft));
  EXPECT_EQ(registry_.add({"draft", ComponentStrategy::kResident, true}, draft).error().code,
            ErrorCode::kAlreadyExists);
  for (const std::string& name : {std::string(), std::string("Draft"), std::string("a,b"),
                                  std::string("all the weights"), std::string(65, 'x')}) {
    EXPECT_EQ(registry_.add({name, ComponentStrategy::kResident, true}, draft).error().code,
              ErrorCode::kInvalidArgument)
        << name;
  }
  const auto known = registry_.components();
  ASSERT_EQ(known.size(), 1U);
  EXPECT_EQ(known[0].name, "draft");
  EXPECT_EQ(known[0].strategy, ComponentStrategy::kOffloaded);
  EXPECT_TRUE(known[0].memory_intensive);
  EXPECT_EQ(known[0].device_bytes, 2 * kMiB);
  registry_.remove("draft");
  registry_.remove("draft");
  EXPECT_TRUE(registry_.components().empty());
  EXPECT_TRUE(registry_.add({"draft", ComponentStrategy::kResident, true}, draft));
}

// Every combination, as the rule says it.
TEST(ShouldEmptyAfterTest, OnlyLargeOnesThatAreGoneOrLayerByLayer) {
  for (const auto strategy : {ComponentStrategy::kResident, ComponentStrategy::kOffloaded,
                              ComponentStrategy::kLayerwise}) {
    for (const std::uint64_t before : {0U, 8U}) {
      for (const std::uint64_t after : {0U, 4U, 8U}) {
        EXPECT_FALSE(should_empty_after(false, strategy, before, after));
        EXPECT_EQ(should_empty_after(true, strategy, before, after),
                  strategy == ComponentStrategy::kLayerwise || (before == 8 && after == 0));
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::worker
