// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/fault_plan.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

using testing::HasSubstr;

class FaultPlanTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!FaultPlan::is_supported()) GTEST_SKIP() << "built without fault points";
  }
};

TEST_F(FaultPlanTest, ReadsWhatWasWritten) {
  const auto plan = FaultPlan::parse("attacher.import=kill,owner.free#3=delay:250,owner.send=fail");
  ASSERT_TRUE(plan.has_value()) << plan.error().to_string();
  ASSERT_EQ(plan->faults.size(), 3U);
  EXPECT_EQ(plan->faults[0].at, Transition::kAttacherImport);
  EXPECT_EQ(plan->faults[0].kind, FaultKind::kKill);
  EXPECT_EQ(plan->faults[0].occurrence, 1U);
  EXPECT_EQ(plan->faults[1].occurrence, 3U);
  EXPECT_EQ(plan->faults[1].delay, std::chrono::milliseconds(250));
  EXPECT_EQ(plan->faults[2].kind, FaultKind::kFail);
  EXPECT_TRUE(FaultPlan::parse("")->faults.empty());
}

TEST_F(FaultPlanTest, NamesThePartThatIsWrong) {
  for (const char* text :
       {"owner.free", "owner.free=", "owner.free=explode", "owner.sleep=kill", "owner.free#0=kill",
        "owner.free#x=kill", "owner.free#99999999999=kill", "owner.free=delay",
        "owner.free=delay:", "owner.free=delay:700000", "owner.free=kill:3", ",owner.free=kill"}) {
    const auto plan = FaultPlan::parse(text);
    ASSERT_FALSE(plan.has_value()) << text;
    EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument) << text;
    EXPECT_THAT(plan.error().message, HasSubstr("fault '")) << text;
  }
}

TEST_F(FaultPlanTest, FailsOnceAtItsOccurrenceAndLeavesARecord) {
  const test::ShortTempDir base;
  const auto dir = RuntimeDir::open(base.path().native(), "test");
  ASSERT_TRUE(dir.has_value());
  auto log =
      TransitionLog::create(*dir, {.role = "worker"}, 64, *FaultPlan::parse("owner.send#2=fail"));
  ASSERT_TRUE(log.has_value()) << log.error().to_string();
  EXPECT_TRUE(log->attempt(Transition::kOwnerFree, {}).has_value());
  EXPECT_TRUE(log->attempt(Transition::kOwnerSend, {}).has_value());
  const Status second = log->attempt(Transition::kOwnerSend, {});
  ASSERT_FALSE(second.has_value());
  EXPECT_THAT(second.error().message, HasSubstr("owner.send"));
  EXPECT_TRUE(log->attempt(Transition::kOwnerSend, {}).has_value());
  const auto trace = read_transitions(*dir);
  ASSERT_TRUE(trace.has_value());
  ASSERT_EQ(trace->records.size(), 5U);
  EXPECT_EQ(trace->records[3].transition, Transition::kStruck);
  EXPECT_EQ(trace->records[3].detail, static_cast<std::uint64_t>(FaultKind::kFail));
}

}  // namespace
}  // namespace kvferry::ipc
