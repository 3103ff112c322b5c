// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_mappers.hpp"

#include "os/syscall.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <string_view>

namespace kvferry::ipc {
namespace {

struct DirectoryCloser {
  void operator()(DIR* directory) const noexcept { ::closedir(directory); }
};

/// Everything of a file of one process; empty when it is gone or not ours to see.
std::string read_process_file(pid_t pid, std::string_view name) {
  const std::string path = fmt::format("/proc/{}/{}", pid, name);
  const UniqueFd file(
      retry_interrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  std::string text;
  std::array<char, 16384> chunk{};
  while (file.valid()) {
    // wait-brief: a file of /proc; the kernel writes it at once
    const ssize_t count = ::read(file.get(), chunk.data(), chunk.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    text.append(chunk.data(), static_cast<std::size_t>(count));
  }
  return text;
}

std::uint64_t mapped_bytes(const std::string& maps, ObjectId object) {
  std::uint64_t sum = 0;
  constexpr std::string_view kMark = "/memfd:kvferry-dev.";
  for (std::size_t mark = maps.find(kMark); mark != std::string::npos;
       mark = maps.find(kMark, mark + kMark.size())) {
    const std::size_t newline = maps.rfind('\n', mark);
    const std::size_t start = newline == std::string::npos ? 0 : newline + 1;
    std::uint64_t first = 0;
    std::uint64_t end = 0;
    unsigned major = 0;
    unsigned minor = 0;
    std::uint64_t inode = 0;
    // "7f0000000000-7f0000200000 rw-s 00000000 00:01 1234    /memfd:kvferry-dev... (deleted)".
    // NOLINTNEXTLINE(cert-err34-c): all five fields must match.
    if (std::sscanf(maps.c_str() + start, "%" SCNx64 "-%" SCNx64 " %*s %*s %x:%x %" SCNu64, &first,
                    &end, &major, &minor, &inode) == 5 &&
        ObjectId{gnu_dev_makedev(major, minor), inode} == object) {
      sum += end - first;
    }
  }
  return sum;
}

}  // namespace

Result<std::vector<Mapper>> find_mappers(ObjectId object) {
  const std::unique_ptr<DIR, DirectoryCloser> processes(::opendir("/proc"));
  if (processes == nullptr) return KVFERRY_ERRNO("list /proc");
  std::vector<Mapper> mappers;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): the stream is ours alone.
  while (const dirent* entry = ::readdir(processes.get())) {
    const std::string_view name(entry->d_name);
    pid_t pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc{} || parsed.ptr != name.data() + name.size()) continue;
    const std::uint64_t bytes = mapped_bytes(read_process_file(pid, "maps"), object);
    if (bytes == 0) continue;
    std::string command = read_process_file(pid, "comm");
    std::erase(command, '\n');
    mappers.push_back(Mapper{pid, std::move(command), bytes});
  }
  return mappers;
}

}  // namespace kvferry::ipc
