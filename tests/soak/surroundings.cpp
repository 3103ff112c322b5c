// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/surroundings.hpp"

#include "environment/heap_gauge.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

namespace kvferry::soak {
namespace {

int retried_waitpid(pid_t pid, int& status, int options) {
  int rc = 0;
  do {
    rc = ::waitpid(pid, &status, options);
  } while (rc < 0 && errno == EINTR);
  return rc;
}

std::string library(const std::string& path, std::string_view target) {
  if (std::filesystem::exists(path)) return path;
  throw ipc::Exception(
      KVFERRY_ERROR(kNotFound, "no library {}: build the target {}", path, target));
}

std::string make_counts() {
  std::string counts = (std::filesystem::temp_directory_path() / "kvferry-odd-XXXXXX").string();
  const ipc::UniqueFd fd(::mkostemp(counts.data(), O_CLOEXEC));
  if (!fd.valid() || ::ftruncate(fd.get(), sizeof(test::OddCounts)) != 0) {
    throw ipc::Exception(KVFERRY_ERRNO("file for counts {}", counts));
  }
  return counts;
}

}  // namespace

void enter(const Surroundings& wanted, char** argv) {
  constexpr const char* kEntered = "KVFERRY_SOAK_ENTERED";
  // Of this process alone, which lives through all kills: with caches per thread and many arenas
  // its private memory is what the allocator keeps, and no process of ours decides that.
  constexpr const char* kAllocator = "GLIBC_TUNABLES";
  constexpr const char* kAllocatorBefore = "KVFERRY_SOAK_ALLOCATOR";
  if (!ipc::environment(kEntered).empty()) {
    (void)::setenv(kAllocator, ipc::environment(kAllocatorBefore).c_str(), 1);
    return;
  }
  std::string preloaded;
  if (!wanted.heap_library.empty()) {
    preloaded = library(wanted.heap_library, "kvferry_heap");
    std::string folder = (std::filesystem::temp_directory_path() / "kvferry-heap-XXXXXX").string();
    if (::mkdtemp(folder.data()) == nullptr) {
      throw ipc::Exception(KVFERRY_ERRNO("folder for heaps {}", folder));
    }
    (void)::setenv(test::kHeapFolderVariable, folder.c_str(), 1);
  }
  if (!wanted.odd.empty()) {
    preloaded += (preloaded.empty() ? "" : ":") + library(wanted.odd_library, "kvferry_odd");
    (void)::setenv(test::kOddVariable, wanted.odd.c_str(), 1);
    (void)::setenv(test::kOddCountsVariable, make_counts().c_str(), 1);
  }
  if (!preloaded.empty()) (void)::setenv("LD_PRELOAD", preloaded.c_str(), 1);
  (void)::setenv(kAllocatorBefore, ipc::environment(kAllocator).c_str(), 1);
  (void)::setenv(kAllocator, "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1", 1);
  (void)::setenv(kEntered, "yes", 1);
  (void)::execv("/proc/self/exe", argv);
  throw ipc::Exception(KVFERRY_ERRNO("start this program anew"));
}

std::array<std::uint64_t, test::kOddNames.size()> read_odd_counts() {
  std::array<std::uint64_t, test::kOddNames.size()> counts{};
  const std::string file = ipc::environment(test::kOddCountsVariable);
  if (file.empty()) return counts;
  std::ifstream(file, std::ios::binary)
      .read(reinterpret_cast<char*>(counts.data()), sizeof(counts));
  (void)::unlink(file.c_str());
  return counts;
}

std::uint64_t read_live_heap(pid_t pid) {
  const std::string folder = ipc::environment(test::kHeapFolderVariable);
  if (folder.empty()) return 0;
  std::int64_t bytes = 0;
  std::ifstream(fmt::format("{}/{}", folder, pid), std::ios::binary)
      .read(reinterpret_cast<char*>(&bytes), sizeof(bytes));
  return bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0;
}

void forget_live_heaps() {
  const std::string folder = ipc::environment(test::kHeapFolderVariable);
  std::error_code ignored;
  if (!folder.empty()) std::filesystem::remove_all(folder, ignored);
}

bool ask_for_pid(pid_t pid) {
  std::ofstream file("/proc/sys/kernel/ns_last_pid");
  return static_cast<bool>(file << pid - 1 << std::flush);
}

pid_t Children::fork_now() {
  const pid_t child = ::fork();
  if (child > 0) ++forked_;
  return child;
}

void Children::stay_and_exit(int lives_ms) {
  (void)::poll(nullptr, 0, lives_ms);
  ::_exit(EXIT_SUCCESS);
}

void Children::note_end(int status) {
  if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS) ++failed_;
}

void Children::reap() {
  std::erase_if(living_, [this](pid_t child) {
    int status = 0;
    if (retried_waitpid(child, status, WNOHANG) == 0) return false;
    note_end(status);
    return true;
  });
}

void Children::wait_all() {
  for (const pid_t child : living_) {
    int status = 0;
    (void)retried_waitpid(child, status, 0);
    note_end(status);
  }
  living_.clear();
}

}  // namespace kvferry::soak
