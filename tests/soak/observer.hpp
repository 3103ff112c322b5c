// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace kvferry::soak {

/// One process, as /proc shows it.
struct ProcessLook {
  std::string name;
  pid_t pid = 0;
  std::uint64_t life = 0;                 ///< Which one of this name.
  std::map<std::string, unsigned> kinds;  ///< Open descriptors by what they are.
  std::uint64_t descriptors = 0;
  std::uint64_t resident_bytes = 0;
  std::uint64_t private_bytes = 0;  ///< Anonymous memory: heap and stacks.
  std::uint64_t heap_bytes = 0;     ///< Allocated and not freed; 0: nothing counts it.
  std::set<std::uint64_t> memfds;   ///< Anonymous shared memory, open or mapped, by inode.
};

/// What a run has out in the world at one quiet moment.
struct Look {
  std::vector<ProcessLook> processes;
  std::set<std::string> names;     ///< In the instance's directory, without the transitions.
  std::uint64_t rings = 0;         ///< Files of transitions.
  std::set<std::string> shm;       ///< /dev/shm, as far as it is ours.
  std::set<std::string> abstract;  ///< Abstract socket names of these processes.
  std::uint64_t memfds = 0;        ///< Distinct ones.
  std::uint64_t device_used = 0;   ///< Simulated devices, by the kernel's books: exact.
  std::uint64_t driver_used =
      0;  ///< GPUs, by the driver: other processes and its own rounding count.
};

/// Looks at one process. Nothing of a dead one.
[[nodiscard]] ProcessLook look_at_process(std::string name, pid_t pid, std::uint64_t life);
/// Fills everything but the devices in, from look.processes and the file system.
void look_around(const std::filesystem::path& instance_dir, Look& look);

/// How `now` differs from `before` in what must not change at all, in words; empty when in nothing.
/// Lives of one name are compared, too: a successor has what its predecessor had.
[[nodiscard]] std::vector<std::string> differences(const Look& before, const Look& now);

}  // namespace kvferry::soak
