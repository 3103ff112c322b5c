// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Every blow at every point of a job's way, at the manager, the mover, the worker and the engine:
// the engine gets an answer in a stated time, whoever is gone is replaced, the next round works, no
// block that was said to be there is wrong, and memory and names are back.
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "matrix/job_cells.hpp"
#include "support/child_process.hpp"
#include "support/instance_checks.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using ipc::Transition;
using std::chrono::milliseconds;

/// The engine's own deadline for a job is the longest that it waits for one answer.
constexpr milliseconds kAnswerBound{5000};
/// What the processes of a busy machine need on top.
constexpr milliseconds kScheduling{6000};
/// From the mending to a round that works: old jobs end, processes start, an epoch is made.
constexpr milliseconds kRecoveryBound{20000};
/// From the last process's end to the device's memory being back.
constexpr milliseconds kSettle{3000};
constexpr milliseconds kRound{20};
constexpr unsigned kKindBits = 8;

/// One process of the instance, as often as it has to be started.
struct Part {
  std::unique_ptr<ChildProcess> process;
  std::vector<std::string> errors;  ///< Of lives that have ended.
};

class JobMatrix : public testing::TestWithParam<JobCell> {
 protected:
  static void SetUpTestSuite() {
    bystander_ = std::make_unique<ChildProcess>(
        ChildOptions{.program = "/bin/sleep", .arguments = {"3600"}});
  }
  static void TearDownTestSuite() { bystander_.reset(); }

  void SetUp() override {
    if (const auto reason = cell().inapplicable()) GTEST_SKIP() << *reason;
    auto instance = ipc::RuntimeDir::open(dir_.path().native(), "test");
    ASSERT_TRUE(instance.has_value()) << instance.error().to_string();
    instance_.emplace(*std::move(instance));
    auto spec = ipc::DeviceSpec::parse(device_);
    ASSERT_TRUE(spec.has_value()) << spec.error().to_string();
    observer_ = ipc::open_device(*spec);
    free_before_ = free_bytes();
  }

  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_FALSE(bystander_->wait_zombie(Deadline::after({}))) << "a process of nobody's was ended";
    parts_.clear();
    EXPECT_TRUE(wait_memory_back()) << "device memory was leaked: " << free_bytes()
                                    << " bytes are free, before it were " << free_before_;
    for (const std::string& breach : find_breaches(*instance_)) ADD_FAILURE() << breach;
    instance_.reset();
    // This process was the last one in there: what it leaves is what stays.
    EXPECT_EQ(names_below(dir_.path()), std::vector<std::string>{}) << "names were left behind";
    EXPECT_FALSE(std::filesystem::exists(dir_.path() / "test"));
  }

  static const JobCell& cell() { return GetParam(); }
  ChildProcess& process(const std::string& name) { return *parts_[name].process; }
  ChildProcess& victim() { return process(cell().victim); }

  void start(const std::string& name, const std::string& faults = {}) {
    std::vector<std::string> environment{"KVFERRY_RUNTIME_DIR=" + dir_.path().string(),
                                         "KVFERRY_INSTANCE=test", "KVFERRY_FAULTS=" + faults};
    ChildOptions options{.program = setting("KVFERRY_MATRIX_PROGRAM", KVFERRY_PROGRAM),
                         .arguments = {name}};
    if (name == "engine") {
      options.program = sibling_program("kvferry_job_engine");
      options.arguments = {dir_.path().string(), "test", geometry()};
    } else if (name == "manager") {
      // Short, so that hundreds of cells fit into minutes.
      environment.insert(environment.end(),
                         {"KVFERRY_HOST_MEMORY=" + setting("KVFERRY_MATRIX_POOL", "4MiB"),
                          "KVFERRY_QUEUE_DEADLINE=1500ms", "KVFERRY_JOB_DEADLINE=700ms"});
    } else {
      environment.insert(environment.end(),
                         {"KVFERRY_GEOMETRY=" + geometry(), "KVFERRY_GPU_BLOCKS=16",
                          "KVFERRY_DEVICE=" + device_, "KVFERRY_CACHE_OWNER=" + cell().owner,
                          "KVFERRY_HANDLES=" + cell().handles, "KVFERRY_DRAIN_DEADLINE=300ms",
                          "KVFERRY_REVOKE_DEADLINE=600ms", "KVFERRY_SETTLE_DEADLINE=400ms"});
    }
    options.environment = std::move(environment);
    Part& part = parts_[name];
    if (name == "engine") running_ = false;
    if (part.process) part.errors.push_back(part.process->stderr_text());
    part.process = std::make_unique<ChildProcess>(std::move(options));
  }

  void start_all() {
    for (const char* name : {"manager", "worker", "mover", "engine"}) {
      std::string faults;
      if (name == cell().victim) faults = plan_of(cell().point, cell().occurrence, cell().blow);
      if (name == cell().other.first) faults = cell().other.second;
      start(name, faults);
    }
    victim_pid_ = victim().pid();
  }

  /// As a supervisor does; the fault plan was the first life's.
  void replace_dead() {
    for (const char* name : {"manager", "worker", "mover", "engine"}) {
      if (process(name).wait(Deadline::after({}))) start(name);
    }
  }

  /// Tells the engine to go through a round, unless one still runs.
  void begin_round() {
    if (running_) return;
    if (process("engine").write_line(fmt::format("round {}", ++round_))) running_ = true;
  }

  /// What the engine said about its round meanwhile.
  std::optional<std::string> hear_engine() {
    const Deadline deadline = Deadline::after(kRound);
    while (const auto line = process("engine").read_line(deadline)) {
      if (line->starts_with("corrupt ")) ADD_FAILURE() << *line;
      if (line->starts_with("round ")) {
        running_ = false;
        return line->substr(line->find(' ', 6) + 1);
      }
    }
    if (process("engine").wait_zombie(Deadline::after({}))) running_ = false;
    return std::nullopt;
  }

  /// The victim's record of the blow, once it has struck: the fault's kind and what it left behind.
  std::optional<std::uint64_t> struck() {
    const auto trace = ipc::read_transitions(*instance_);
    if (!trace) return std::nullopt;
    std::map<std::uint32_t, Transition> last;  // by thread of the victim
    for (const ipc::TransitionRecord& record : trace->records) {
      if (trace->writers[record.writer].who.pid != victim_pid_) continue;
      if (record.transition == Transition::kStruck && last[record.thread] == cell().point) {
        return record.detail;
      }
      if (record.transition != Transition::kStruck) last[record.thread] = record.transition;
    }
    return std::nullopt;
  }

  void drive();
  void see_survivors();
  void mend();
  void next_round_works();
  void end_all();
  std::string stories();
  void report(const std::string& outcome, milliseconds took) const;

  static std::string setting(const char* name, const std::string& otherwise) {
    std::string value = ipc::environment(name);
    return value.empty() ? otherwise : value;
  }
  /// On a GPU, one with blocks that take their time.
  static std::string geometry() { return setting("KVFERRY_MATRIX_GEOMETRY", "tiny"); }
  /// Free memory as the driver tells this process, which has no part in it.
  [[nodiscard]] std::uint64_t free_bytes() {
    const auto memory = observer_->memory_info();
    EXPECT_TRUE(memory.has_value());
    return memory ? memory->free_bytes : 0;
  }

  /// A driver takes a moment to take back what a process had that has just ended.
  bool wait_memory_back() {
    // Its own books may differ by a page afterwards.
    constexpr std::uint64_t kSlack = 2ULL << 20;
    const std::uint64_t slack = device_.starts_with("host:") ? 0 : kSlack;
    const Deadline deadline = Deadline::after(kSettle);
    while (free_bytes() + slack < free_before_) {
      if (deadline.expired()) return false;
      // Nobody was told to live for so long: it ends by the deadline.
      (void)bystander_->wait_zombie(deadline.earlier(Deadline::after(kRound)));
    }
    return true;
  }

  const std::string device_ =
      setting("KVFERRY_MATRIX_DEVICE", fmt::format("host:jobs-{}:64MiB", ::getpid()));
  std::unique_ptr<ipc::Device> observer_;
  std::uint64_t free_before_ = 0;
  ShortTempDir dir_;
  std::optional<ipc::RuntimeDir> instance_;
  std::map<std::string, Part> parts_;
  pid_t victim_pid_ = 0;
  std::uint64_t round_ = 0;
  bool running_ = false;
  std::optional<std::string> answer_;  ///< Of the round that was struck.
  inline static std::unique_ptr<ChildProcess> bystander_;
};

std::string JobMatrix::stories() {
  std::string text;
  for (const auto& [name, part] : parts_) {
    for (const std::string& errors : part.errors) text += name + " (ended):\n" + errors + "\n";
    if (part.process) text += name + ":\n" + part.process->stderr_text() + "\n";
  }
  return text;
}

// Rounds until the blow, wherever it comes.
void JobMatrix::drive() {
  const Deadline deadline = Deadline::after(kRecoveryBound + kAnswerBound);
  const std::string& other = cell().other.first;
  while (!struck()) {
    ASSERT_FALSE(deadline.expired()) << "the point was not reached\n" << stories();
    // Whoever's death leads to the point is replaced, as a supervisor would.
    if (!other.empty() && process(other).wait(Deadline::after({}))) start(other);
    begin_round();
    answer_ = hear_engine();
  }
}

// What the engine is told while the victim is as the blow left it.
void JobMatrix::see_survivors() {
  const ipc::TimePoint start_time = ipc::MonotonicClock::now();
  const auto took = [start_time] {
    return std::chrono::duration_cast<milliseconds>(ipc::MonotonicClock::now() - start_time);
  };
  if (cell().victim == "engine") {
    const bool dead = cell().blow == Blow::kKill || cell().blow == Blow::kOrphan;
    return report(dead ? "replaced" : "goes_on", took());
  }
  const Deadline deadline = Deadline::after(kAnswerBound + kScheduling);
  begin_round();
  while (!answer_) {
    ASSERT_FALSE(deadline.expired()) << "the engine waits for ever\n" << stories();
    // A supervisor replaces the dead, but nobody has looked after the stopped yet.
    replace_dead();
    begin_round();
    answer_ = hear_engine();
  }
  const std::string outcome = *answer_ == "ok" ? "ok" : answer_->substr(answer_->find(' ') + 1);
  report(outcome.substr(0, outcome.find(':')), took());
}

// As an operator would: continue what is stopped, end what stays so.
void JobMatrix::mend() {
  const auto blow = struck();
  ASSERT_TRUE(blow);
  if (cell().blow == Blow::kStop) ::kill(victim_pid_, SIGCONT);
  const bool cannot_close =
      cell().blow == Blow::kFail && cell().point == Transition::kAttacherUnmap;
  if (cell().blow == Blow::kStopForGood || cannot_close) {
    if (victim().pid() == victim_pid_) victim().signal(SIGKILL);
  }
  if (cell().blow == Blow::kOrphan) {
    const auto orphan = static_cast<pid_t>(*blow >> kKindBits);
    ASSERT_GT(orphan, 0);
    EXPECT_EQ(::kill(orphan, SIGKILL), 0);
  }
}

void JobMatrix::next_round_works() {
  const Deadline deadline = Deadline::after(kRecoveryBound + kScheduling);
  std::string last;
  for (;;) {
    replace_dead();
    begin_round();
    const auto answer = hear_engine();
    // A round that began before the mending counts as well: it is one after the blow.
    if (answer == "ok") return;
    if (answer) last = *answer;
    ASSERT_FALSE(deadline.expired()) << "no round works: " << last << "\n" << stories();
  }
}

void JobMatrix::end_all() {
  (void)process("engine").write_line("quit");
  EXPECT_EQ(process("engine").wait(soon()), ChildExit::exited(0));
  for (const char* name : {"worker", "mover", "manager"}) process(name).signal(SIGTERM);
  for (const char* name : {"worker", "mover", "manager"}) {
    EXPECT_EQ(process(name).wait(soon()), ChildExit::exited(0)) << name << "\n"
                                                                << process(name).stderr_text();
  }
}

TEST_P(JobMatrix, IsSurvived) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  ASSERT_NO_FATAL_FAILURE(drive());
  ASSERT_NO_FATAL_FAILURE(see_survivors());
  ASSERT_NO_FATAL_FAILURE(mend());
  ASSERT_NO_FATAL_FAILURE(next_round_works());
  ASSERT_NO_FATAL_FAILURE(end_all());
}

void JobMatrix::report(const std::string& outcome, milliseconds took) const {
  const std::string path = ipc::environment("KVFERRY_MATRIX_REPORT");
  if (path.empty()) return;
  const nlohmann::json line = {{"victim", cell().victim},
                               {"point", ipc::to_string(cell().point)},
                               {"occurrence", cell().occurrence},
                               {"blow", to_string(cell().blow)},
                               {"owner", cell().owner},
                               {"handles", cell().handles},
                               {"outcome", outcome},
                               {"ms", took.count()}};
  std::ofstream(path, std::ios::app) << line.dump() + "\n";
}

INSTANTIATE_TEST_SUITE_P(Cells, JobMatrix, testing::ValuesIn(job_cells()), [](const auto& shown) {
  return shown.param.name();
});

}  // namespace
}  // namespace kvferry::test
