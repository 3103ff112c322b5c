// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "run/child.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::soak {

enum class Role : std::uint8_t { kManager, kWorker, kMover };
[[nodiscard]] const char* to_string(Role role) noexcept;

/// How the processes of a soak are started.
struct FleetOptions {
  std::filesystem::path program;  ///< The built kvferry.
  std::filesystem::path runtime_dir;
  std::filesystem::path log_dir;
  std::string instance;
  std::string engine;
  std::string owner = "worker";
  std::string handles = "vmm";
  std::string geometry = "tiny";
  std::string copy_strategy = "auto";
  std::vector<std::string> devices;  ///< One per rank.
  std::uint32_t gpu_blocks = 64;
  /// Of "tiny" 128 blocks: somewhat more than the traffic keeps, so that it is full, and what the
  /// manager knows of it complete, in the first hundreds of cycles.
  std::uint64_t host_memory = 4ULL << 20;
  bool reuse_pids = false;  ///< The next life of a process gets the number of the last one.
};

/// One process of the fleet over all its lives.
struct Member {
  std::string name;  ///< "mover/0"
  Role role = Role::kManager;
  std::vector<std::string> arguments;
  ipc::ProcessRef process;
  std::uint64_t lives = 0;
  pid_t last_pid = 0;  ///< Of the life before.
};

/// A manager, and a worker and a mover for each rank: real processes of the built program. They end
/// by themselves when this process dies. @threading one at a time.
class Fleet {
 public:
  /// Starts all. Throws Exception.
  explicit Fleet(FleetOptions options);
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;
  /// Kills and reaps what still runs.
  ~Fleet();

  [[nodiscard]] const FleetOptions& options() const noexcept { return options_; }
  [[nodiscard]] std::vector<Member>& members() noexcept { return members_; }
  [[nodiscard]] const std::vector<Member>& members() const noexcept { return members_; }
  /// Starts the next life. Throws Exception. @pre the last one is reaped.
  void start(Member& member);
  /// Of a member that has died.
  [[nodiscard]] cli::ChildEnd reap(Member& member);
  /// SIGTERM to movers and workers, then to the manager. What did not end with exit code 0 in time
  /// is named; it is killed.
  [[nodiscard]] std::vector<std::string> end_all(ipc::Duration each);
  /// How many lives had the number of the one before.
  [[nodiscard]] std::uint64_t pids_reused() const noexcept { return pids_reused_; }
  [[nodiscard]] std::string log_tail(const Member& member, std::size_t lines) const;

 private:
  [[nodiscard]] std::filesystem::path log_of(const Member& member) const;

  FleetOptions options_;
  ipc::UniqueFd children_end_;  ///< Read end, given to children.
  ipc::UniqueFd our_end_;       ///< Never written: its closing tells them that we are gone.
  std::vector<Member> members_;
  std::uint64_t pids_reused_ = 0;
};

}  // namespace kvferry::soak
