// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/observer.hpp"

#include "soak/surroundings.hpp"
#include "support/descriptors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

namespace kvferry::soak {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMemfdName = "/memfd:";

std::uint64_t to_number(std::string_view text) {
  std::uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void look_at_descriptors(ProcessLook& look, std::set<std::uint64_t>* sockets) {
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(fmt::format("/proc/{}/fd", look.pid), error)) {
    const std::string target = fs::read_symlink(entry.path(), error);
    if (error) continue;
    ++look.descriptors;
    ++look.kinds[test::descriptor_kind(target)];
    constexpr std::string_view kSocket = "socket:[";
    if (sockets != nullptr && target.starts_with(kSocket)) {
      sockets->insert(to_number(std::string_view(target).substr(kSocket.size())));
    }
    if (!target.starts_with(kMemfdName)) continue;
    std::ifstream info(
        fmt::format("/proc/{}/fdinfo/{}", look.pid, entry.path().filename().string()));
    for (std::string line; std::getline(info, line);) {
      if (!line.starts_with("ino:")) continue;
      look.memfds.insert(
          to_number(std::string_view(line).substr(line.find_first_not_of(" \t", 4))));
    }
  }
}

void look_at_mappings(ProcessLook& look) {
  std::ifstream maps(fmt::format("/proc/{}/maps", look.pid));
  for (std::string line; std::getline(maps, line);) {
    // start-end perms offset dev inode path
    if (line.find(kMemfdName) == std::string::npos) continue;
    std::istringstream fields(line);
    std::string skipped;
    std::uint64_t inode = 0;
    fields >> skipped >> skipped >> skipped >> skipped >> inode;
    look.memfds.insert(inode);
  }
  std::ifstream rollup(fmt::format("/proc/{}/smaps_rollup", look.pid));
  for (std::string line; std::getline(rollup, line);) {
    std::istringstream fields(line);
    std::string key;
    std::uint64_t kib = 0;
    fields >> key >> kib;
    if (key == "Rss:") look.resident_bytes = kib << 10U;
    if (key == "Anonymous:") look.private_bytes = kib << 10U;
  }
}

/// The driver's library names a socket after its process, "@cuda-uvmfd-NAMESPACE-PID@": a
/// successor's is the same one.
std::string with_names(const std::string& socket, const std::vector<ProcessLook>& processes) {
  for (const ProcessLook& process : processes) {
    const std::string pid = fmt::format("-{}@", process.pid);
    if (const std::size_t at = socket.find(pid); at != std::string::npos) {
      return socket.substr(0, at + 1) + process.name + "@";
    }
  }
  return socket;
}

template <typename Set>
void compare_sets(std::string_view what,
                  const Set& before,
                  const Set& now,
                  std::vector<std::string>& found) {
  for (const auto& name : now) {
    if (!before.contains(name)) found.push_back(fmt::format("{} '{}' is new", what, name));
  }
  for (const auto& name : before) {
    if (!now.contains(name)) found.push_back(fmt::format("{} '{}' is gone", what, name));
  }
}

}  // namespace

ProcessLook look_at_process(std::string name, pid_t pid, std::uint64_t life) {
  ProcessLook look;
  look.name = std::move(name);
  look.pid = pid;
  look.life = life;
  look_at_descriptors(look, nullptr);
  look_at_mappings(look);
  look.heap_bytes = read_live_heap(pid);
  return look;
}

void look_around(const fs::path& instance_dir, Look& look) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(instance_dir, error)) {
    const std::string name = entry.path().filename();
    // Who looks for an owner listens on the seek name for as long as it looks; killed meanwhile, it
    // leaves one behind, until the next one looks.
    const bool seeks = name.ends_with(".seek") || name.ends_with(".seek.lock");
    if (name != "transitions" && !seeks) look.names.insert(name);
  }
  for (const auto& entry : fs::directory_iterator(instance_dir / "transitions", error)) {
    (void)entry;
    ++look.rings;
  }
  // Other runs may be under way beside this one: the runtime directory's name is this one's own.
  const std::string run = instance_dir.parent_path().filename();
  const std::string token = run.substr(run.find('-') + 1);
  for (const fs::directory_entry& entry : fs::directory_iterator("/dev/shm", error)) {
    const std::string name = entry.path().filename();
    if (name.find(token) != std::string::npos) look.shm.insert(name);
  }
  std::set<std::uint64_t> memfds;
  std::set<std::uint64_t> sockets;
  for (ProcessLook& process : look.processes) {
    memfds.insert(process.memfds.begin(), process.memfds.end());
    ProcessLook again;
    again.pid = process.pid;
    look_at_descriptors(again, &sockets);
  }
  look.memfds = memfds.size();
  std::ifstream unix_sockets("/proc/net/unix");
  for (std::string line; std::getline(unix_sockets, line);) {
    // Num RefCount Protocol Flags Type St Inode Path
    std::istringstream fields(line);
    std::string skipped;
    std::uint64_t inode = 0;
    std::string path;
    for (int i = 0; i < 6; ++i) fields >> skipped;
    fields >> inode >> path;
    if (path.starts_with("@") && sockets.contains(inode)) {
      look.abstract.insert(with_names(path, look.processes));
    }
  }
}

std::vector<std::string> differences(const Look& before, const Look& now) {
  std::vector<std::string> found;
  for (const ProcessLook& process : now.processes) {
    const auto earlier =
        std::find_if(before.processes.begin(), before.processes.end(),
                     [&](const ProcessLook& other) { return other.name == process.name; });
    if (earlier == before.processes.end()) {
      found.push_back(fmt::format("process {} is new", process.name));
    } else if (earlier->kinds != process.kinds) {
      found.push_back(fmt::format("{} (life {}): {} descriptors {}, before {} {}", process.name,
                                  process.life, process.descriptors, process.kinds,
                                  earlier->descriptors, earlier->kinds));
    }
  }
  compare_sets("name", before.names, now.names, found);
  compare_sets("/dev/shm name", before.shm, now.shm, found);
  compare_sets("abstract socket", before.abstract, now.abstract, found);
  if (before.memfds != now.memfds) {
    found.push_back(fmt::format("{} memory objects, before {}", now.memfds, before.memfds));
  }
  if (before.device_used != now.device_used) {
    found.push_back(fmt::format("{} bytes of the devices are used, before {}", now.device_used,
                                before.device_used));
  }
  return found;
}

}  // namespace kvferry::soak
