// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A mover that has no descriptors left, or hardly any: its work goes on, it does not spin, and it
// is back once it has some.
#include "multiproc/mover_fixture.hpp"
#include "support/processor_time.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>

namespace kvferry {
namespace {

using std::chrono_literals::operator""ms;
using testing::HasSubstr;
using testing::Not;

class MoverDescriptorsTest : public test::MoverFixture {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(MoverFixture::SetUp());
    ASSERT_EQ(::prlimit(mover_->pid(), RLIMIT_NOFILE, nullptr, &before_), 0);
  }
  void set_descriptors(rlim_t count) {
    const rlimit limit{count, before_.rlim_max};
    ASSERT_EQ(::prlimit(mover_->pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
  }
  [[nodiscard]] rlim_t open_descriptors() const {
    const std::string folder = fmt::format("/proc/{}/fd", mover_->pid());
    return static_cast<rlim_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
  }
  void restart_manager() {
    manager_.reset();
    {
      const std::lock_guard lock(shared_.mutex);
      shared_.mover_state.reset();
    }
    start_manager();
  }
  /// A simulated device wants a descriptor for a copy: the job succeeds, or says that it lacks one.
  void expect_answer() {
    const std::uint8_t result = copy(ipc::CopyDirection::kDeviceToHost);
    if (result == 0) return;
    EXPECT_EQ(result, static_cast<std::uint8_t>(ipc::ErrorCode::kSystem));
    EXPECT_THAT(shared_.answers.back().message, HasSubstr("Too many open files"));
  }
  [[nodiscard]] bool has_said(const char* text) const {
    return mover_->stderr_text().find(text) != std::string::npos;
  }
  /// The manager is gone and back, and the mover cannot reach it for a second.
  void expect_patience(const char* complaint) {
    restart_manager();
    const ipc::Deadline deadline = test::soon();
    do {
      const auto used = test::processor_time(mover_->pid());
      ASSERT_FALSE(mover_->wait_zombie(ipc::Deadline::after(400ms))) << mover_->stderr_text();
      EXPECT_LT(test::processor_time(mover_->pid()) - used, 200ms) << "it tries again and again";
    } while (!has_said(complaint) && !deadline.expired());
    EXPECT_THAT(mover_->stderr_text(), HasSubstr(complaint));
    EXPECT_THAT(mover_->stderr_text(), Not(HasSubstr("is dead"))) << "nobody has died";
    ASSERT_NO_FATAL_FAILURE(set_descriptors(before_.rlim_cur));
    ASSERT_NO_FATAL_FAILURE(wait_mover());
    store();
  }

  rlimit before_{};
};

TEST_F(MoverDescriptorsTest, WithoutAnyItGoesOnAndReconnectsWhenItHasSome) {
  store();
  // Of about three dozen that are open. Fewer would be too few for poll(2) as well.
  ASSERT_NO_FATAL_FAILURE(set_descriptors(16));
  expect_answer();
  expect_patience("Too many open files");
}

// Enough to connect, not enough for what a connection needs behind that: ZeroMQ would end the
// process in the middle.
TEST_F(MoverDescriptorsTest, WithAFewItAsksBeforeItConnects) {
  // The connection that it loses gives back about a dozen.
  for (const rlim_t fewer : {12U, 11U, 10U, 9U, 8U, 7U, 6U}) {
    SCOPED_TRACE(fewer);
    ASSERT_NO_FATAL_FAILURE(set_descriptors(open_descriptors() - fewer));
    expect_answer();
    ASSERT_NO_FATAL_FAILURE(expect_patience("waiting for the manager"));
  }
}

}  // namespace
}  // namespace kvferry
