// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "host_fixture.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "support/child_process.hpp"
#include "support/host_memory.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

using test::ChildExit;
using test::ChildProcess;
using test::soon;

constexpr std::uint64_t kCapacity = 32 * kMiB;

class HostDeviceProcessesTest : public HostDeviceFixture {
 protected:
  void SetUp() override {
    std::array<int, 2> ends{};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
    owner_end_ = UniqueFd(ends[0]);
    peer_end_ = UniqueFd(ends[1]);
    ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    lifeline_read_ = UniqueFd(ends[0]);
    lifeline_ = UniqueFd(ends[1]);
  }
  void TearDown() override {
    EXPECT_EQ(used_after_death(0U), 0U) << "the test leaks device memory";
  }

  /// Sanitizers leave SIGSEGV to the kernel: a fault is to end the child as it does elsewhere.
  ChildProcess start(const UniqueFd& socket_end) {
    ChildProcess child({.program = test::sibling_program("kvferry_host_device_child"),
                        .arguments = {spec(kCapacity).to_string()},
                        .environment = {"ASAN_OPTIONS=handle_segv=0", "TSAN_OPTIONS=handle_segv=0"},
                        .pass_fds = {socket_end.get(), lifeline_read_.get()}});
    EXPECT_EQ(child.read_line(soon()), "ready");
    return child;
  }
  ChildProcess start_owner() { return start(owner_end_); }
  ChildProcess start_peer() { return start(peer_end_); }

  static std::string ask(ChildProcess& child, std::string_view line) {
    EXPECT_TRUE(child.write_line(line));
    const auto answer = child.read_line(soon());
    if (!answer.has_value()) ADD_FAILURE() << line << ": no answer; " << child.stderr_text();
    return answer.value_or("");
  }
  /// The number in "ok NUMBER".
  static std::uint64_t ask_number(ChildProcess& child, std::string_view line) {
    const std::string answer = ask(child, line);
    EXPECT_TRUE(answer.starts_with("ok ")) << line << ": " << answer;
    std::uint64_t number = 0;
    if (answer.size() > 3) {
      std::from_chars(answer.data() + 3, answer.data() + answer.size(), number);
    }
    return number;
  }
  static void expect_ok(ChildProcess& child, std::string_view line) {
    EXPECT_TRUE(ask(child, line).starts_with("ok")) << line;
  }
  static void end(ChildProcess& child) {
    EXPECT_TRUE(child.write_line("end"));
    EXPECT_EQ(child.wait(soon()), ChildExit::exited(0)) << child.stderr_text();
  }
  static std::uint64_t used_after_death(std::uint64_t expected) {
    return test::host_bytes_after_death(device_name(), expected);
  }
  static void kill_dead(ChildProcess& child) {
    child.kill();
    EXPECT_EQ(child.wait(soon()), ChildExit::killed_by(SIGKILL));
  }

  /// Owner has 4 MiB of that kind, peer maps it.
  static void share(ChildProcess& owner, ChildProcess& peer, std::string_view kind) {
    expect_ok(owner, fmt::format("alloc {} {}", kind, 4 * kMiB));
    expect_ok(owner, "write 0");
    expect_ok(owner, "export 0");
    expect_ok(peer, "import");
    EXPECT_EQ(ask(peer, "read 0"), "ok 42");
    EXPECT_EQ(used_after_death(4 * kMiB), 4 * kMiB);
  }

  /// The same count made another way: names of all memory objects in all processes' mappings and
  /// descriptors.
  static std::uint64_t used_by_names() {
    const std::string mark = fmt::format("memfd:kvferry-dev.{}.{}.", device_name(), kCapacity);
    std::set<std::string> seen;
    std::uint64_t sum = 0;
    const auto add = [&](const std::string& text, const std::string& inode) {
      const std::size_t at = text.find(mark);
      if (at == std::string::npos || !seen.insert(inode).second) return;
      std::uint64_t size = 0;
      std::from_chars(text.data() + at + mark.size(), text.data() + text.size(), size);
      sum += size;
    };
    std::error_code gone;
    for (const auto& process : std::filesystem::directory_iterator("/proc")) {
      std::ifstream maps(process.path() / "maps");
      std::string range;
      std::string flags;
      std::string offset;
      std::string device;
      std::string inode;
      std::string rest;
      while (maps >> range >> flags >> offset >> device >> inode && std::getline(maps, rest)) {
        add(rest, inode);
      }
      for (const auto& fd : std::filesystem::directory_iterator(process.path() / "fd", gone)) {
        struct stat info {};
        if (::stat(fd.path().c_str(), &info) != 0) continue;
        add(std::filesystem::read_symlink(fd.path(), gone).string(), std::to_string(info.st_ino));
      }
    }
    return sum;
  }

  /// Ends a process that a child forked, and waits until the kernel has taken it down.
  void end_forks(std::uint64_t pid) {
    const auto fork = ProcessRef::of_pid(static_cast<pid_t>(pid));
    lifeline_.reset();
    EXPECT_TRUE(!fork.has_value() || fork->wait_death(soon()));
  }

  UniqueFd owner_end_;
  UniqueFd peer_end_;
  UniqueFd lifeline_read_;
  UniqueFd lifeline_;
};

TEST_F(HostDeviceProcessesTest, AllProcessesShareOneCapacityAndOneCount) {
  ChildProcess one = start_owner();
  ChildProcess two = start_peer();
  expect_ok(one, fmt::format("alloc vmm {}", 10 * kMiB));
  expect_ok(two, fmt::format("alloc legacy {}", 6 * kMiB));
  EXPECT_EQ(used(), 16 * kMiB);
  EXPECT_EQ(used_by_names(), 16 * kMiB);
  EXPECT_EQ(ask_number(one, "free"), 16 * kMiB);
  EXPECT_EQ(ask_number(two, "free"), 16 * kMiB);
  const std::string refused = ask(two, fmt::format("alloc vmm {}", 18 * kMiB));
  EXPECT_TRUE(refused.starts_with("error no_device_memory")) << refused;
  EXPECT_NE(refused.find("18874368 bytes asked"), std::string::npos) << refused;
  EXPECT_NE(refused.find("16777216 bytes free"), std::string::npos) << refused;
  expect_ok(one, "release 0");
  expect_ok(two, fmt::format("alloc vmm {}", 18 * kMiB));
  end(one);
  EXPECT_EQ(used_after_death(24 * kMiB), 24 * kMiB);
  EXPECT_EQ(used_by_names(), 24 * kMiB);
  end(two);
}

TEST_F(HostDeviceProcessesTest, AKilledProcessGivesItsMemoryBack) {
  ChildProcess child = start_owner();
  expect_ok(child, fmt::format("alloc vmm {}", 8 * kMiB));
  expect_ok(child, fmt::format("alloc legacy {}", 8 * kMiB));
  EXPECT_EQ(used(), 16 * kMiB);
  child.kill();
  // Dead is enough; nobody has to reap it.
  ASSERT_TRUE(child.wait_zombie(soon()));
  EXPECT_EQ(used_after_death(0U), 0U);
}

TEST_F(HostDeviceProcessesTest, MemoryOfAKilledOwnerLivesUntilItsImporterLetsGo) {
  for (const char* kind : {"vmm", "legacy"}) {
    ChildProcess owner = start_owner();
    ChildProcess peer = start_peer();
    share(owner, peer, kind);
    kill_dead(owner);
    EXPECT_EQ(used(), 4 * kMiB) << kind;
    EXPECT_EQ(used_by_names(), 4 * kMiB) << kind;
    EXPECT_EQ(ask(peer, "read 0"), "ok 42");
    expect_ok(peer, "release 0");
    EXPECT_EQ(used_after_death(0U), 0U) << kind;
    end(peer);
  }
}

TEST_F(HostDeviceProcessesTest, AKilledImporterLetsGo) {
  for (const char* kind : {"vmm", "legacy"}) {
    ChildProcess owner = start_owner();
    ChildProcess peer = start_peer();
    share(owner, peer, kind);
    peer.kill();
    ASSERT_TRUE(peer.wait_zombie(soon()));
    expect_ok(owner, "release 0");
    EXPECT_EQ(used_after_death(0U), 0U) << kind;
    end(owner);
  }
}

TEST_F(HostDeviceProcessesTest, ReferenceCountedMemoryMayBeFreedUnderAMapping) {
  ChildProcess owner = start_owner();
  ChildProcess peer = start_peer();
  share(owner, peer, "vmm");
  expect_ok(owner, "release 0");
  EXPECT_EQ(used(), 4 * kMiB);
  EXPECT_EQ(ask(peer, "read 0"), "ok 42");
  expect_ok(peer, "release 0");
  EXPECT_EQ(used(), 0U);
  end(peer);
  end(owner);
}

TEST_F(HostDeviceProcessesTest, LegacyFreeUnderALivingMappingAbortsWithAReport) {
  for (const char* how : {"release 0", "drop 0"}) {
    ChildProcess owner = start_owner();
    ChildProcess peer = start_peer();
    share(owner, peer, "legacy");
    EXPECT_TRUE(owner.write_line(how));
    ASSERT_EQ(owner.wait(soon()), ChildExit::killed_by(SIGABRT)) << how;
    const std::string report = owner.stderr_text();
    // The kernel cuts the command's name at 15 characters.
    for (const std::string& part :
         {fmt::format("pid {} (kvferry_host_de)", peer.pid()), std::string("4194304 bytes"),
          std::string("inode "), device_name()}) {
      EXPECT_NE(report.find(part), std::string::npos) << part << " is not in: " << report;
    }
    end(peer);
  }
}

TEST_F(HostDeviceProcessesTest, LegacyFreeAfterTheImporterLetGoIsFine) {
  ChildProcess owner = start_owner();
  ChildProcess peer = start_peer();
  share(owner, peer, "legacy");
  expect_ok(owner, "export 0");
  expect_ok(peer, "import");
  expect_ok(peer, "release 0");
  EXPECT_EQ(ask(peer, "read 1"), "ok 42");
  expect_ok(peer, "release 1");
  expect_ok(owner, "release 0");
  EXPECT_EQ(used(), 0U);
  end(peer);
  end(owner);
}

TEST_F(HostDeviceProcessesTest, AForkedChildOfADeadImporterIsStillAMapper) {
  ChildProcess owner = start_owner();
  ChildProcess peer = start_peer();
  share(owner, peer, "legacy");
  const std::uint64_t fork = ask_number(peer, "fork");
  kill_dead(peer);
  EXPECT_EQ(used(), 4 * kMiB);
  EXPECT_TRUE(owner.write_line("release 0"));
  ASSERT_EQ(owner.wait(soon()), ChildExit::killed_by(SIGABRT));
  EXPECT_NE(owner.stderr_text().find(fmt::format("pid {} ", fork)), std::string::npos)
      << owner.stderr_text();
  EXPECT_EQ(used(), 4 * kMiB) << "the forked child holds it beyond both";
  end_forks(fork);
}

TEST_F(HostDeviceProcessesTest, TouchingReleasedMemoryFaults) {
  for (const char* how : {"alloc vmm 4194304", "alloc legacy 4194304", "alloc_at 4194304"}) {
    ChildProcess child = start_owner();
    const std::uint64_t reserved = ask_number(child, "reserve 4194304");
    const std::uint64_t address = ask_number(child, how);
    EXPECT_EQ(address == reserved, std::string_view(how).starts_with("alloc_at"));
    expect_ok(child, "write 0");
    expect_ok(child, "release 0");
    EXPECT_TRUE(child.write_line("read 0"));
    EXPECT_EQ(child.wait(soon()), ChildExit::killed_by(SIGSEGV)) << how;
  }
}

TEST_F(HostDeviceProcessesTest, ImportersKeepOldPagesWhileTheOwnerReallocatesInPlace) {
  ChildProcess owner = start_owner();
  ChildProcess peer = start_peer();
  const std::uint64_t reserved = ask_number(owner, "reserve 4194304");
  EXPECT_EQ(ask_number(owner, "alloc_at 4194304"), reserved);
  expect_ok(owner, "write 0");
  expect_ok(owner, "export 0");
  expect_ok(peer, "import");
  expect_ok(owner, "release 0");
  EXPECT_EQ(ask_number(owner, "alloc_at 4194304"), reserved);
  EXPECT_EQ(ask(owner, "read 1"), "ok 0") << "the owner sees new pages";
  EXPECT_EQ(ask(peer, "read 0"), "ok 42") << "the importer still has the old ones";
  EXPECT_EQ(used(), 8 * kMiB);
  end(peer);
  EXPECT_EQ(used_after_death(4 * kMiB), 4 * kMiB);
  end(owner);
}

TEST_F(HostDeviceProcessesTest, ProcessesThatAllocateAtOnceFillTheDeviceExactly) {
  std::vector<ChildProcess> children;
  children.reserve(4);
  for (int i = 0; i < 4; ++i) children.push_back(start_owner());
  for (ChildProcess& child : children) {
    EXPECT_TRUE(child.write_line(fmt::format("fill vmm {}", 2 * kMiB)));
  }
  std::uint64_t pieces = 0;
  for (ChildProcess& child : children) {
    EXPECT_LE(used(), kCapacity) << "seen from outside";
    const auto answer = child.read_line(soon());
    ASSERT_TRUE(answer.has_value() && answer->starts_with("ok "));
    pieces += std::stoull(answer->substr(3));
  }
  EXPECT_EQ(pieces, 16U);
  EXPECT_EQ(used(), kCapacity);
  EXPECT_EQ(used_by_names(), kCapacity);
  for (ChildProcess& child : children) kill_dead(child);
}

TEST_F(HostDeviceProcessesTest, AnotherCapacityIsRefusedAcrossProcesses) {
  ChildProcess child = start_owner();
  EXPECT_THROW(open(2 * kCapacity), Exception);
  EXPECT_EQ(open(kCapacity)->memory_info()->total_bytes, kCapacity);
  kill_dead(child);
  EXPECT_EQ(open(2 * kCapacity)->memory_info()->total_bytes, 2 * kCapacity);
}

TEST_F(HostDeviceProcessesTest, AStoppedProcessIsNoHindrance) {
  ChildProcess child = start_owner();
  expect_ok(child, fmt::format("alloc vmm {}", 4 * kMiB));
  EXPECT_TRUE(child.stop());
  const auto device = open(kCapacity);
  EXPECT_EQ(device->memory_info()->free_bytes, kCapacity - 4 * kMiB);
  const auto memory = allocate(*device, kCapacity - 4 * kMiB);
  EXPECT_EQ(used(), kCapacity);
  kill_dead(child);
}

}  // namespace
}  // namespace kvferry::ipc
