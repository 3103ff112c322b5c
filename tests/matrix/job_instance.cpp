// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "matrix/job_instance.hpp"

#include "kvferry/ipc/os/process.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <utility>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using ipc::Transition;

/// On a GPU, one with blocks that take their time.
std::string geometry() { return JobInstance::setting("KVFERRY_MATRIX_GEOMETRY", "tiny"); }

}  // namespace

JobInstance::JobInstance(std::string owner, std::string handles)
    : owner_(std::move(owner)), handles_(std::move(handles)) {
  auto instance = ipc::RuntimeDir::open(dir_.path().native(), "test");
  if (!instance) throw ipc::Exception(std::move(instance).error());
  instance_.emplace(*std::move(instance));
}

JobInstance::~JobInstance() = default;

std::string JobInstance::setting(const char* name, const std::string& otherwise) {
  std::string value = ipc::environment(name);
  return value.empty() ? otherwise : value;
}

std::string JobInstance::device() {
  return setting("KVFERRY_MATRIX_DEVICE", fmt::format("host:jobs-{}:64MiB", ::getpid()));
}

void JobInstance::start(const std::string& name, const Start& how) {
  std::vector<std::string> environment{"KVFERRY_RUNTIME_DIR=" + dir_.path().string(),
                                       "KVFERRY_INSTANCE=test", "KVFERRY_FAULTS=" + how.faults,
                                       "KVFERRY_MUTANT=" + how.mutant};
  ChildOptions options{.program = setting("KVFERRY_MATRIX_PROGRAM", KVFERRY_PROGRAM),
                       .arguments = {name}};
  if (!how.program.empty()) options.program = how.program;
  if (name == "engine") {
    options.program = sibling_program("kvferry_job_engine");
    options.arguments = {dir_.path().string(), "test", geometry()};
  } else if (name == "manager") {
    environment.insert(environment.end(),
                       {"KVFERRY_HOST_MEMORY=" + setting("KVFERRY_MATRIX_POOL", "4MiB"),
                        "KVFERRY_QUEUE_DEADLINE=1500ms", "KVFERRY_JOB_DEADLINE=700ms"});
  } else {
    environment.insert(environment.end(),
                       {"KVFERRY_GEOMETRY=" + geometry(), "KVFERRY_GPU_BLOCKS=16",
                        "KVFERRY_DEVICE=" + device(), "KVFERRY_CACHE_OWNER=" + owner_,
                        "KVFERRY_HANDLES=" + handles_, "KVFERRY_DRAIN_DEADLINE=300ms",
                        "KVFERRY_REVOKE_DEADLINE=600ms", "KVFERRY_SETTLE_DEADLINE=400ms",
                        // Its descriptors and memory are none of a cell's.
                        "KVFERRY_CALIBRATION=off"});
  }
  options.environment = std::move(environment);
  Part& part = parts_[name];
  if (name == "engine") running_ = false;
  if (part.process) part.errors.push_back(part.process->stderr_text());
  part.process = std::make_unique<ChildProcess>(std::move(options));
}

std::unique_ptr<ChildProcess> JobInstance::start_operator(
    const std::vector<std::string>& arguments) const {
  return std::make_unique<ChildProcess>(ChildOptions{
      .program = setting("KVFERRY_MATRIX_PROGRAM", KVFERRY_PROGRAM),
      .arguments = arguments,
      .environment = {"KVFERRY_RUNTIME_DIR=" + dir_.path().string(), "KVFERRY_INSTANCE=test"}});
}

void JobInstance::replace_dead() {
  for (const char* name : kNames) {
    if (process(name).wait(Deadline::after({}))) start(name);
  }
}

void JobInstance::tell_engine(const char* what) {
  if (running_) return;
  if (process("engine").write_line(fmt::format("{} {}", what, ++round_))) running_ = true;
}

std::optional<std::string> JobInstance::hear_engine() {
  const Deadline deadline = Deadline::after(kRound);
  while (const auto line = process("engine").read_line(deadline)) {
    if (line->starts_with("corrupt ")) corrupt_.push_back(*line);
    if (line->starts_with("round ")) {
      running_ = false;
      return line->substr(line->find(' ', 6) + 1);
    }
  }
  if (process("engine").wait_zombie(Deadline::after({}))) running_ = false;
  return std::nullopt;
}

std::vector<std::string> JobInstance::take_corrupt() { return std::exchange(corrupt_, {}); }

ipc::Result<ipc::TransitionTrace> JobInstance::trace() const {
  return ipc::read_transitions(*instance_);
}

std::optional<std::uint64_t> JobInstance::struck(pid_t pid, Transition point) const {
  const auto recorded = trace();
  if (!recorded) return std::nullopt;
  std::map<std::uint32_t, Transition> last;  // by thread
  for (const ipc::TransitionRecord& record : recorded->records) {
    if (recorded->writers[record.writer].who.pid != pid) continue;
    if (record.transition == Transition::kStruck && last[record.thread] == point) {
      return record.detail;
    }
    if (record.transition != Transition::kStruck) last[record.thread] = record.transition;
  }
  return std::nullopt;
}

std::string JobInstance::stories() const {
  std::string text;
  for (const auto& [name, part] : parts_) {
    for (const std::string& errors : part.errors) text += name + " (ended):\n" + errors + "\n";
    if (part.process) text += name + ":\n" + part.process->stderr_text() + "\n";
  }
  return text;
}

}  // namespace kvferry::test
