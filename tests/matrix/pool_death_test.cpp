// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// How soon memory is back when processes of an instance are killed under traffic, with a host pool
// that may be large (KVFERRY_MATRIX_POOL) and is in use: on a GPU (KVFERRY_MATRIX_DEVICE) the mover
// has pinned what was used of it, and the driver has to let go of each page before the process is
// gone.
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "matrix/job_instance.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using std::chrono::milliseconds;

constexpr milliseconds kBase{1000};
/// For each GiB that the victim has pinned.
constexpr milliseconds kPerGiB{35};
/// For each GiB that nobody is left to hold: the kernel takes its pages back one by one.
constexpr milliseconds kPerGiBOfNobody{200};
/// What the processes of a busy machine, or of a sanitizer, need on top where devices are
/// simulated: there it is not the kernel's books that take the time.
constexpr milliseconds kScheduling{10'000};
/// To start an instance, and to fill its pool.
constexpr milliseconds kStart{100'000};
constexpr std::uint64_t kGiB = 1ULL << 30;
/// The driver's own books may differ by a page.
constexpr std::uint64_t kSlack = 2ULL << 20;
/// Less than what one process on a GPU takes of it.
constexpr std::uint64_t kContext = 256ULL << 20;
/// Of the pool has to be in the mover's hands before it is killed.
constexpr double kUsed = 0.9;

/// A line of a file of the kernel's, in bytes.
std::uint64_t read_kib(const std::string& file, const std::string& key) {
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key)) return std::stoull(line.substr(key.size())) << 10U;
  }
  return 0;
}
/// All shared memory of the machine, the pools of managers among it.
std::uint64_t shared_memory() { return read_kib("/proc/meminfo", "Shmem:"); }

struct Victims {
  std::string name;
  std::vector<std::string> killed;

  [[nodiscard]] bool are_all() const { return killed.size() == JobInstance::kNames.size(); }
  [[nodiscard]] bool has(const std::string& kind) const {
    return std::find(killed.begin(), killed.end(), kind) != killed.end();
  }
};

class PoolDeathTest : public testing::TestWithParam<Victims> {
 protected:
  static void SetUpTestSuite() { (void)::setenv("KVFERRY_MATRIX_POOL", "32MiB", 0); }

  void SetUp() override {
    auto spec = ipc::DeviceSpec::parse(JobInstance::device());
    ASSERT_TRUE(spec.has_value()) << spec.error().to_string();
    observer_ = ipc::open_device(*spec);
    auto size = ipc::parse_size(JobInstance::setting("KVFERRY_MATRIX_POOL", ""));
    ASSERT_TRUE(size.has_value()) << size.error().to_string();
    pool_ = *size;
    const auto share = [this](milliseconds each) {
      return milliseconds(each.count() * static_cast<std::int64_t>(pool_) /
                          static_cast<std::int64_t>(kGiB));
    };
    bound_ = kBase;
    if (GetParam().has("mover")) bound_ += share(kPerGiB);
    if (GetParam().are_all()) bound_ += share(kPerGiBOfNobody);
    if (!is_gpu()) bound_ += kScheduling;
  }

  [[nodiscard]] static bool is_gpu() { return JobInstance::device().starts_with("cuda"); }

  std::uint64_t free_bytes() {
    const auto memory = observer_->memory_info();
    return memory ? memory->free_bytes : 0;
  }

  /// True once it holds, looked at every few milliseconds.
  template <typename Condition> bool until(const Deadline& deadline, Condition holds) {
    while (!holds()) {
      if (deadline.expired()) return false;
      (void)waiter_.wait_zombie(Deadline::after(milliseconds(2)));
    }
    return true;
  }

  /// What has to be free when memory is back: at first, and just before the blow.
  [[nodiscard]] std::uint64_t due(std::uint64_t at_first, std::uint64_t before) const {
    if (GetParam().are_all()) return at_first - kSlack;
    // Simulated devices know no contexts, and a worker's arena is all that they lend.
    if (!is_gpu()) return GetParam().has("worker") ? at_first : 0;
    return GetParam().has("worker") || GetParam().has("mover") ? before + kContext : 0;
  }

  void fill(JobInstance& instance);
  void wait_for_traffic(JobInstance& instance);

  std::unique_ptr<ipc::Device> observer_;
  std::uint64_t pool_ = 0;
  milliseconds bound_{};
  /// Lives longer than any test: to wait on.
  ChildProcess waiter_{ChildOptions{.program = "/bin/sleep", .arguments = {"3600"}}};
};

void PoolDeathTest::fill(JobInstance& instance) {
  const Deadline deadline = Deadline::after(kStart);
  const std::string mover = fmt::format("/proc/{}/status", instance.process("mover").pid());
  std::string last;
  while (static_cast<double>(read_kib(mover, "RssShmem:")) < kUsed * static_cast<double>(pool_)) {
    ASSERT_FALSE(deadline.expired()) << "the pool is not in use: " << last << instance.stories();
    instance.begin_fill();
    if (const auto answer = instance.hear_engine()) last = *answer;
  }
}

// A copy of the mover's has begun since.
void PoolDeathTest::wait_for_traffic(JobInstance& instance) {
  const auto latest = [&instance] {
    std::chrono::nanoseconds when{};
    const auto trace = instance.trace();
    if (!trace) return when;
    for (const ipc::TransitionRecord& record : trace->records) {
      if (record.transition == ipc::Transition::kMoverCopying) when = record.time;
    }
    return when;
  };
  const auto before = latest();
  const Deadline deadline = Deadline::after(kStart);
  while (latest() <= before) {
    ASSERT_FALSE(deadline.expired()) << instance.stories();
    instance.begin_fill();
    (void)instance.hear_engine();
  }
}

TEST_P(PoolDeathTest, MemoryIsBackInTime) {
  const std::uint64_t free_before = free_bytes();
  const std::uint64_t shared_before = shared_memory();
  JobInstance instance("worker", "vmm");
  for (const char* name : JobInstance::kNames) instance.start(name);
  ASSERT_NO_FATAL_FAILURE(fill(instance));
  ASSERT_NO_FATAL_FAILURE(wait_for_traffic(instance));
  const std::uint64_t free_then = free_bytes();
  EXPECT_LT(free_then, free_before);

  const ipc::TimePoint struck = ipc::MonotonicClock::now();
  const auto elapsed = [struck] {
    return std::chrono::duration_cast<milliseconds>(ipc::MonotonicClock::now() - struck).count();
  };
  const Deadline deadline = Deadline::after(bound_);
  for (const std::string& name : GetParam().killed) instance.process(name).kill();
  for (const std::string& name : GetParam().killed) {
    EXPECT_TRUE(instance.process(name).wait(deadline)) << name << " is not gone";
  }
  const auto gone = elapsed();
  const std::uint64_t wanted = due(free_before, free_then);
  const char* what = wanted == 0 ? "gone" : "memory back";
  EXPECT_TRUE(until(deadline, [&] { return free_bytes() >= wanted; }))
      << free_bytes() << " bytes of the device are free, " << wanted << " are due; " << free_then
      << " were free before the blow, " << free_before << " at first";
  // Others on the machine have shared memory, too: a large pool tells itself from theirs.
  if (GetParam().are_all() && pool_ >= kGiB) {
    EXPECT_TRUE(until(deadline, [&] { return shared_memory() <= shared_before + pool_ / 10; }))
        << shared_memory() << " bytes are shared, " << shared_before << " before";
  }
  std::cout << fmt::format(
      "killed {}: gone after {} ms, {} after {} ms, bound {} ms, {} of host memory in use\n",
      GetParam().name, gone, what, elapsed(), bound_.count(), ipc::format_size(pool_));
}

INSTANTIATE_TEST_SUITE_P(Victims,
                         PoolDeathTest,
                         testing::Values(Victims{"manager", {"manager"}},
                                         Victims{"mover", {"mover"}},
                                         Victims{"worker", {"worker"}},
                                         Victims{"engine", {"engine"}},
                                         Victims{"all", {"manager", "mover", "worker", "engine"}}),
                         [](const auto& shown) { return shown.param.name; });

}  // namespace
}  // namespace kvferry::test
