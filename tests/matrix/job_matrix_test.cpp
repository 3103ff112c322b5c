// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Every blow at every point of a job's way, at the manager, the mover, the worker and the engine:
// the engine gets an answer in a stated time, whoever is gone is replaced, the next round works, no
// block that was said to be there is wrong, and memory and names are back.
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "matrix/job_cells.hpp"
#include "matrix/job_instance.hpp"
#include "support/descriptors.hpp"
#include "support/instance_checks.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
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
/// From the last process's end to the device's memory being back, and from a round to its
/// descriptors being closed.
constexpr milliseconds kSettle{3000};
constexpr unsigned kKindBits = 8;

class JobMatrix : public testing::TestWithParam<JobCell> {
 protected:
  static void SetUpTestSuite() {
    bystander_ = std::make_unique<ChildProcess>(
        ChildOptions{.program = "/bin/sleep", .arguments = {"3600"}});
  }
  static void TearDownTestSuite() { bystander_.reset(); }

  void SetUp() override {
    if (const auto reason = cell().inapplicable()) GTEST_SKIP() << *reason;
    instance_.emplace(cell().owner, cell().handles);
    auto spec = ipc::DeviceSpec::parse(JobInstance::device());
    ASSERT_TRUE(spec.has_value()) << spec.error().to_string();
    observer_ = ipc::open_device(*spec);
    free_before_ = free_bytes();
  }

  void TearDown() override {
    if (IsSkipped() || !instance_) return;
    EXPECT_FALSE(bystander_->wait_zombie(Deadline::after({}))) << "a process of nobody's was ended";
    instance_->kill_all();
    for (const std::string& corrupt : instance_->take_corrupt()) ADD_FAILURE() << corrupt;
    EXPECT_TRUE(wait_memory_back()) << "device memory was leaked: " << free_bytes()
                                    << " bytes are free, before it were " << free_before_;
    for (const std::string& breach : find_breaches(instance_->runtime_dir())) {
      ADD_FAILURE() << breach;
    }
    instance_->leave();
    EXPECT_EQ(names_below(instance_->folder()), std::vector<std::string>{})
        << "names were left behind";
    EXPECT_FALSE(std::filesystem::exists(instance_->folder() / "test"));
  }

  static const JobCell& cell() { return GetParam(); }
  ChildProcess& process(const std::string& name) { return instance_->process(name); }
  ChildProcess& victim() { return process(cell().victim); }

  void start_all() {
    for (const char* name : JobInstance::kNames) {
      std::string faults;
      if (name == cell().victim) faults = plan_of(cell().point, cell().occurrence, cell().blow);
      if (name == cell().other.first) faults = cell().other.second;
      instance_->start(name, {.faults = faults});
    }
    victim_pid_ = victim().pid();
  }

  /// Of each process.
  using Descriptors = std::map<std::string, DescriptorKinds>;
  Descriptors descriptors() {
    Descriptors all;
    for (const char* name : JobInstance::kNames) all[name] = descriptor_kinds(process(name).pid());
    return all;
  }
  void begin(bool by_layers) {
    if (by_layers) {
      instance_->begin_layers();
    } else {
      instance_->begin_round();
    }
  }
  void come_to_rest();
  void learn_descriptors();
  void see_descriptors();

  /// The victim's record of the blow, once it has struck.
  std::optional<std::uint64_t> struck() { return instance_->struck(victim_pid_, cell().point); }

  /// Whether the manager has seen the engine's death, and has ended all that it took of it.
  bool is_forgotten() {
    const auto trace = instance_->trace();
    if (!trace) return false;
    std::uint64_t engine = 0;
    for (const auto& writer : trace->writers) {
      if (writer.who.pid == victim_pid_) engine = writer.who.incarnation.low();
    }
    std::set<ipc::JobId> taken;
    bool is_seen = false;
    for (const ipc::TransitionRecord& record : trace->records) {
      const bool is_of_it = record.peer == engine;
      if (record.transition == Transition::kManagerSeesDeath && is_of_it) is_seen = true;
      if (record.transition == Transition::kManagerTake && is_of_it) taken.insert(record.job);
      if (record.transition == Transition::kManagerEnd) taken.erase(record.job);
    }
    return is_seen && taken.empty();
  }

  void drive();
  void see_survivors();
  void mend();
  void next_round_works(bool by_layers);
  void end_all();
  std::string stories() { return instance_->stories(); }
  void report(const std::string& outcome, milliseconds took) const;

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
    const std::uint64_t slack = JobInstance::device().starts_with("host:") ? 0 : kSlack;
    const Deadline deadline = Deadline::after(kSettle);
    while (free_bytes() + slack < free_before_) {
      if (deadline.expired()) return false;
      // Nobody was told to live for so long: it ends by the deadline.
      (void)bystander_->wait_zombie(deadline.earlier(Deadline::after(JobInstance::kRound)));
    }
    return true;
  }

  std::unique_ptr<ipc::Device> observer_;
  std::uint64_t free_before_ = 0;
  std::optional<JobInstance> instance_;
  pid_t victim_pid_ = 0;
  std::optional<std::string> answer_;  ///< Of the round that was struck.
  /// Of an instance that nothing has struck, after a round; by owner and handles.
  inline static std::map<std::string, Descriptors> undisturbed_;
  inline static std::unique_ptr<ChildProcess> bystander_;
};

// Rounds until the blow, wherever it comes.
void JobMatrix::drive() {
  const Deadline deadline = Deadline::after(kRecoveryBound + kAnswerBound);
  const std::string& other = cell().other.first;
  while (!struck()) {
    ASSERT_FALSE(deadline.expired()) << "the point was not reached\n" << stories();
    // Whoever's death leads to the point is replaced, as a supervisor would.
    if (!other.empty() && process(other).wait(Deadline::after({}))) {
      instance_->start(other);
    }
    begin(cell().by_layers);
    answer_ = instance_->hear_engine();
  }
}

// What the engine is told while the victim is as the blow left it.
void JobMatrix::see_survivors() {
  const ipc::TimePoint start_time = ipc::MonotonicClock::now();
  const auto took = [start_time] {
    return std::chrono::duration_cast<milliseconds>(ipc::MonotonicClock::now() - start_time);
  };
  const Deadline deadline = Deadline::after(kAnswerBound + kScheduling);
  if (cell().victim == "engine") {
    // A stopped engine is in nobody's way; of a dead one the manager has to know, and to end its
    // jobs.
    const bool dead = cell().blow == Blow::kKill || cell().blow == Blow::kOrphan;
    while (dead && !is_forgotten()) {
      ASSERT_FALSE(deadline.expired()) << "nobody sees that the engine is dead\n" << stories();
      (void)bystander_->wait_zombie(Deadline::after(JobInstance::kRound));
    }
    return report(dead ? "let_go" : "goes_on", took());
  }
  begin(cell().by_layers);
  while (!answer_) {
    ASSERT_FALSE(deadline.expired()) << "the engine waits for ever\n" << stories();
    // A supervisor replaces the dead, but nobody has looked after the stopped yet.
    instance_->replace_dead();
    begin(cell().by_layers);
    answer_ = instance_->hear_engine();
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
    const ipc::Status ended = end_orphan(static_cast<pid_t>(*blow >> kKindBits));
    EXPECT_TRUE(ended) << ended.error().to_string();
  }
}

void JobMatrix::next_round_works(bool by_layers) {
  const Deadline deadline = Deadline::after(kRecoveryBound + kScheduling);
  std::string last;
  for (;;) {
    instance_->replace_dead();
    begin(by_layers);
    const auto answer = instance_->hear_engine();
    // A round that began before the mending counts as well: it is one after the blow.
    if (answer == "ok") return;
    if (answer) last = *answer;
    ASSERT_FALSE(deadline.expired()) << "no round works: " << last << "\n" << stories();
  }
}

// With all connections that there ever are.
void JobMatrix::come_to_rest() {
  const Deadline deadline = Deadline::after(kRecoveryBound);
  for (std::optional<std::string> answer; answer != "ok"; answer = instance_->hear_engine()) {
    ASSERT_FALSE(deadline.expired()) << stories();
    instance_->begin_rest();
  }
}

// What an instance has open when nothing has struck it.
void JobMatrix::learn_descriptors() {
  const std::string kind = cell().owner + cell().handles;
  // Where every cell has a process of its own, one of each kind learns it for all.
  const std::string kept = ipc::environment("KVFERRY_MATRIX_UNDISTURBED");
  if (nlohmann::json all = nlohmann::json::parse(std::ifstream(kept), nullptr, false);
      !all.is_discarded()) {
    undisturbed_ = all.get<std::map<std::string, Descriptors>>();
  }
  if (undisturbed_.contains(kind)) return;
  for (const char* name : JobInstance::kNames) instance_->start(name);
  ASSERT_NO_FATAL_FAILURE(next_round_works(/*by_layers=*/false));
  ASSERT_NO_FATAL_FAILURE(come_to_rest());
  const Deadline deadline = Deadline::after(kSettle);
  for (Descriptors last, now = descriptors(); last != now; now = descriptors()) {
    ASSERT_FALSE(deadline.expired()) << "descriptors come and go";
    last = now;
    (void)instance_->hear_engine();
  }
  undisturbed_[kind] = descriptors();
  if (!kept.empty()) std::ofstream(kept) << nlohmann::json(undisturbed_);
  ASSERT_NO_FATAL_FAILURE(end_all());
  instance_->kill_all();
}

// Whoever lived through it, and whoever was replaced, has open what such a process always has.
void JobMatrix::see_descriptors() {
  Descriptors expected = undisturbed_[cell().owner + cell().handles];
  const auto seen = [&] {
    Descriptors now = descriptors();
    // A worker keeps one for each layer's hand-over that was under way beside another.
    if (cell().by_layers) now["worker"].erase("[eventfd]");
    return now;
  };
  if (cell().by_layers) expected["worker"].erase("[eventfd]");
  ASSERT_NO_FATAL_FAILURE(come_to_rest());
  const Deadline deadline = Deadline::after(kSettle);
  while (seen() != expected && !deadline.expired()) (void)instance_->hear_engine();
  for (const auto& [name, kinds] : seen()) {
    EXPECT_EQ(kinds, expected.at(name)) << name << " has other descriptors open than before";
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
  ASSERT_NO_FATAL_FAILURE(learn_descriptors());
  ASSERT_NO_FATAL_FAILURE(start_all());
  ASSERT_NO_FATAL_FAILURE(drive());
  ASSERT_NO_FATAL_FAILURE(see_survivors());
  ASSERT_NO_FATAL_FAILURE(mend());
  if (cell().by_layers) {
    ASSERT_NO_FATAL_FAILURE(next_round_works(/*by_layers=*/true));
  }
  ASSERT_NO_FATAL_FAILURE(next_round_works(/*by_layers=*/false));
  ASSERT_NO_FATAL_FAILURE(see_descriptors());
  ASSERT_NO_FATAL_FAILURE(end_all());
}

void JobMatrix::report(const std::string& outcome, milliseconds took) const {
  const std::string path = ipc::environment("KVFERRY_MATRIX_REPORT");
  if (path.empty()) return;
  const nlohmann::json line = {
      {"victim", cell().victim},
      {"point", std::string(ipc::to_string(cell().point)) + (cell().by_layers ? " by layers" : "")},
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
