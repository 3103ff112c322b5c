// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// A real worker process whose gathers and scatters, and whose compute, a test can hold up:
// gated_worker_child RUNTIME_DIR DEVICE OWNER HANDLES. The linker puts gates between the host
// backend's streams and its kernels, so that everything else is what runs in production.
//
// Commands, one per line: "hold" closes the gate of gathers and scatters, "open" opens it; "hold
// compute" and "open compute" likewise for kernels that fill blocks, of which "pass compute" lets
// one through; "sever" shuts every staging connection down while both processes live on. A kernel
// that waits at a gate says "held", or "compute held".
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/kernels/host_twins.hpp"
#include "kvferry/worker/worker.hpp"
#include "multiproc/worker_setup.hpp"
#include "support/child_side.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace {

using kvferry::kernels::BlockIds;
using kvferry::kernels::PackedBlocks;
using kvferry::kernels::SeededBlocks;
using kvferry::kernels::StridedRegion;

class Gate {
 public:
  explicit Gate(std::string_view held_text) : held_text_(held_text) {}
  void hold() {
    const std::lock_guard lock(mutex_);
    held_ = true;
  }
  void open() {
    {
      const std::lock_guard lock(mutex_);
      held_ = false;
    }
    changed_.notify_all();
  }
  void let_one_pass() {
    {
      const std::lock_guard lock(mutex_);
      ++passes_;
    }
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    if (held_ && passes_ == 0) kvferry::test::say(held_text_);
    changed_.wait(lock, [this] { return !held_ || passes_ > 0; });
    if (held_) --passes_;
  }

 private:
  const std::string_view held_text_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  int passes_ = 0;  ///< While it is held, which are let through.
};

Gate& gate() {
  static Gate gate("held");
  return gate;
}
Gate& compute_gate() {
  static Gate gate("compute held");
  return gate;
}

// Connections that were accepted under the agent's name carry that name.
bool is_staging_connection(int fd) {
  sockaddr_un address{};
  socklen_t length = sizeof(address);
  int listens = 0;
  socklen_t size = sizeof(listens);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
         address.sun_family == AF_UNIX &&
         std::string_view(address.sun_path).find("agent") != std::string_view::npos &&
         ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens == 0;
}

void sever() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename().string());
    if (is_staging_connection(fd)) ::shutdown(fd, SHUT_RDWR);
  }
  kvferry::test::say("severed");
}

void obey() {
  while (const auto command = kvferry::test::hear()) {
    if (*command == "hold") {
      gate().hold();
      kvferry::test::say("holding");
    } else if (*command == "open") {
      gate().open();
    } else if (*command == "hold compute") {
      compute_gate().hold();
      kvferry::test::say("holding compute");
    } else if (*command == "pass compute") {
      compute_gate().let_one_pass();
    } else if (*command == "open compute") {
      compute_gate().open();
    } else if (*command == "sever") {
      sever();
    }
  }
  gate().open();
  compute_gate().open();
}

}  // namespace

// The linker's names for "what the caller meant" and "what it gets" (--wrap).
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming,cert-dcl37-c,cert-dcl51-cpp)
void KVFERRY_REAL_GATHER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_REAL_SCATTER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_REAL_FILL(const StridedRegion* regions,
                       std::uint32_t region_count,
                       const SeededBlocks& blocks);
void KVFERRY_WRAP_GATHER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_WRAP_SCATTER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_WRAP_FILL(const StridedRegion* regions,
                       std::uint32_t region_count,
                       const SeededBlocks& blocks);

void KVFERRY_WRAP_GATHER(const PackedBlocks& layout, const BlockIds& ids) {
  gate().pass();
  KVFERRY_REAL_GATHER(layout, ids);
}
void KVFERRY_WRAP_SCATTER(const PackedBlocks& layout, const BlockIds& ids) {
  gate().pass();
  KVFERRY_REAL_SCATTER(layout, ids);
}
void KVFERRY_WRAP_FILL(const StridedRegion* regions,
                       std::uint32_t region_count,
                       const SeededBlocks& blocks) {
  compute_gate().pass();
  KVFERRY_REAL_FILL(regions, region_count, blocks);
}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming,cert-dcl37-c,cert-dcl51-cpp)
}

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: gated_worker_child RUNTIME_DIR DEVICE OWNER HANDLES\n");
    return 2;
  }
  kvferry::test::disable_core_dumps();
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
  std::thread(obey).detach();  // Ends with the process: it waits for the test's next word.
  try {
    kvferry::ipc::init_logging("worker/0", kvferry::ipc::LogLevel::kInfo);
    kvferry::worker::WorkerConfig config;
    config.rank = kvferry::test::rank_config(argv[1], argv[2], argv[3], argv[4]);
    kvferry::worker::run_worker(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gated_worker_child: %s\n", error.what());
    return 1;
  }
}
