// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/fleet.hpp"

#include "soak/surroundings.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <utility>

namespace kvferry::soak {

const char* to_string(Role role) noexcept {
  switch (role) {
    case Role::kManager: return "manager";
    case Role::kWorker: return "worker";
    case Role::kMover: return "mover";
  }
  return "unknown";
}

Fleet::Fleet(FleetOptions options) : options_(std::move(options)) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw ipc::Exception(KVFERRY_ERRNO("pipe for the children"));
  }
  children_end_ = ipc::UniqueFd(ends[0]);
  our_end_ = ipc::UniqueFd(ends[1]);
  const auto add = [this](std::string name, Role role, std::vector<std::string> own) {
    Member member;
    member.name = std::move(name);
    member.role = role;
    member.arguments = {to_string(role), "--instance=" + options_.instance,
                        "--runtime-dir=" + options_.runtime_dir.string(), "--log-level=info",
                        fmt::format("--parent-fd={}", cli::kInheritedFd)};
    member.arguments.insert(member.arguments.end(), own.begin(), own.end());
    members_.push_back(std::move(member));
  };
  add("manager", Role::kManager, {fmt::format("--host-memory={}", options_.host_memory)});
  for (std::size_t rank = 0; rank < options_.devices.size(); ++rank) {
    const std::vector<std::string> shared = {"--engine=" + options_.engine,
                                             fmt::format("--rank={}", rank),
                                             fmt::format("--ranks={}", options_.devices.size()),
                                             "--geometry=" + options_.geometry,
                                             fmt::format("--gpu-blocks={}", options_.gpu_blocks),
                                             "--device=" + options_.devices[rank],
                                             "--cache-owner=" + options_.owner,
                                             "--handles=" + options_.handles};
    add(fmt::format("worker/{}", rank), Role::kWorker, shared);
    std::vector<std::string> mover = shared;
    mover.push_back("--copy-strategy=" + options_.copy_strategy);
    add(fmt::format("mover/{}", rank), Role::kMover, mover);
  }
  for (Member& member : members_) start(member);
}

Fleet::~Fleet() {
  for (Member& member : members_) {
    if (!member.process.valid()) continue;
    (void)member.process.signal(SIGKILL);
    (void)cli::reap_child(member.process.pid());
  }
}

std::filesystem::path Fleet::log_of(const Member& member) const {
  std::string file = member.name;
  std::replace(file.begin(), file.end(), '/', '-');
  return options_.log_dir / (file + ".log");
}

std::string Fleet::log_tail(const Member& member, std::size_t lines) const {
  return cli::tail_of(log_of(member), lines);
}

void Fleet::start(Member& member) {
  // Hundreds of lives and ten thousand cycles would fill a disk; what matters is at the end.
  constexpr std::uintmax_t kMaxLogBytes = 8U << 20;
  std::error_code ignored;
  const std::filesystem::path log = log_of(member);
  if (std::filesystem::file_size(log, ignored) > kMaxLogBytes && !ignored) {
    std::filesystem::rename(log, log.string() + ".1", ignored);
  }
  cli::ChildStart start;
  start.program = options_.program;
  start.arguments = member.arguments;
  start.log_file = log;
  start.inherited_fd = children_end_.get();
  // Somebody else may take the number first, a thread will do: then this life has another one.
  if (options_.reuse_pids && member.last_pid != 0) (void)ask_for_pid(member.last_pid);
  auto process = cli::start_child(start);
  if (!process) throw ipc::Exception(std::move(process).error());
  member.process = std::move(*process);
  ++member.lives;
  if (member.process.pid() == member.last_pid) ++pids_reused_;
}

cli::ChildEnd Fleet::reap(Member& member) {
  const pid_t pid = member.process.pid();
  member.process = ipc::ProcessRef();
  member.last_pid = pid;
  return cli::reap_child(pid);
}

std::vector<std::string> Fleet::end_all(ipc::Duration each) {
  std::vector<std::string> wrong;
  const auto end_those = [&](bool managers) {
    const auto chosen = [managers](const Member& member) {
      return member.process.valid() && (member.role == Role::kManager) == managers;
    };
    for (Member& member : members_) {
      if (chosen(member)) (void)member.process.signal(SIGTERM);
    }
    const ipc::Deadline deadline = ipc::Deadline::after(each);
    for (Member& member : members_) {
      if (!chosen(member)) continue;
      const bool ended = member.process.wait_death(deadline);
      if (!ended) (void)member.process.signal(SIGKILL);
      const cli::ChildEnd end = reap(member);
      if (!ended || end.exit_code != 0) {
        wrong.push_back(fmt::format("{}: {}; the end of its log:\n{}", member.name, end.text,
                                    log_tail(member, 20)));
      }
    }
  };
  end_those(false);
  end_those(true);
  return wrong;
}

}  // namespace kvferry::soak
