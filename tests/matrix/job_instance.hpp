// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "support/child_process.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::test {

/// A manager, a worker, a mover and an engine (job_engine.cpp) as real processes in a folder of
/// their own, with deadlines so short that hundreds of their stories fit into minutes. This process
/// is a member of the instance, so that its folder stays. @threading one at a time.
class JobInstance {
 public:
  static constexpr std::array<const char*, 4> kNames{"manager", "worker", "mover", "engine"};
  /// How long hear_engine() listens.
  static constexpr std::chrono::milliseconds kRound{20};

  /// owner: "worker" or "mover"; handles: "vmm" or "legacy". The device is KVFERRY_MATRIX_DEVICE,
  /// or a host one of this process's own. Throws ipc::Exception.
  JobInstance(std::string owner, std::string handles);
  JobInstance(const JobInstance&) = delete;
  JobInstance& operator=(const JobInstance&) = delete;
  ~JobInstance();

  /// What the environment says, or the other.
  [[nodiscard]] static std::string setting(const char* name, const std::string& otherwise);
  [[nodiscard]] static std::string device();

  struct Start {
    std::string faults = {};   ///< FaultPlan::parse() takes it.
    std::string program = {};  ///< Of a daemon; empty: kvferry.
    std::string mutant = {};   ///< The mistake that the program makes (tests/mutants/).
  };
  /// Of one of kNames, once more if it was there.
  void start(const std::string& name, const Start& how);
  void start(const std::string& name) { start(name, Start()); }
  /// A command of an operator's, "clear" say.
  [[nodiscard]] std::unique_ptr<ChildProcess> start_operator(
      const std::vector<std::string>& arguments) const;
  /// As a supervisor does; the fault plan was the first life's.
  void replace_dead();
  void kill_all() { parts_.clear(); }
  [[nodiscard]] ChildProcess& process(const std::string& name) { return *parts_[name].process; }

  /// Tells the engine to go through a round, or to leave the instance at rest, unless it still runs
  /// one.
  void begin_round() { tell_engine("round"); }
  void begin_rest() { tell_engine("rest"); }
  /// Or to store and load layer by layer.
  void begin_layers() { tell_engine("layers"); }
  /// Or to store some hundred blocks more.
  void begin_fill() { tell_engine("fill"); }
  /// What the engine said about its round meanwhile: "ok", or what failed.
  std::optional<std::string> hear_engine();
  /// What it said about wrong blocks; forgotten with this.
  [[nodiscard]] std::vector<std::string> take_corrupt();

  [[nodiscard]] const std::filesystem::path& folder() const { return dir_.path(); }
  [[nodiscard]] const ipc::RuntimeDir& runtime_dir() const { return *instance_; }
  [[nodiscard]] ipc::Result<ipc::TransitionTrace> trace() const;
  /// A process's record of the blow, once it has struck at that point: the fault's kind and what it
  /// left behind.
  [[nodiscard]] std::optional<std::uint64_t> struck(pid_t pid, ipc::Transition point) const;
  /// This process leaves as the last one: what it leaves is what stays.
  void leave() { instance_.reset(); }
  /// What all of them said, ended lives included.
  [[nodiscard]] std::string stories() const;

 private:
  void tell_engine(const char* what);

  /// One process of the instance, as often as it has to be started.
  struct Part {
    std::unique_ptr<ChildProcess> process;
    std::vector<std::string> errors;  ///< Of lives that have ended.
  };

  std::string owner_;
  std::string handles_;
  ShortTempDir dir_;
  std::optional<ipc::RuntimeDir> instance_;
  std::map<std::string, Part> parts_;
  std::vector<std::string> corrupt_;
  std::uint64_t round_ = 0;
  bool running_ = false;
};

}  // namespace kvferry::test
