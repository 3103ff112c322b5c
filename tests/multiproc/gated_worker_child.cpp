// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
//
// A real worker process whose gathers and scatters a test can hold up:
// gated_worker_child RUNTIME_DIR DEVICE OWNER HANDLES. The linker puts the gate between the host
// backend's streams and its kernels, so that everything else is what runs in production.
//
// Commands, one per line: "hold" closes the gate, "open" opens it, "sever" shuts every staging
// connection down while both processes live on. A kernel that waits at the gate says "held".
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/kernels/host_twins.hpp"
#include "kvferry/worker/worker.hpp"
#include "multiproc/worker_setup.hpp"
#include "support/child_side.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <condition_variable>
#include <csignal>
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

class Gate {
 public:
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
  void pass() {
    std::unique_lock lock(mutex_);
    if (held_) kvferry::test::say("held");
    changed_.wait(lock, [this] { return !held_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
};

Gate& gate() {
  static Gate gate;
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
    } else if (*command == "sever") {
      sever();
    }
  }
  gate().open();
}

}  // namespace

// The linker's names for "what the caller meant" and "what it gets" (--wrap).
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming,cert-dcl37-c,cert-dcl51-cpp)
void KVFERRY_REAL_GATHER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_REAL_SCATTER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_WRAP_GATHER(const PackedBlocks& layout, const BlockIds& ids);
void KVFERRY_WRAP_SCATTER(const PackedBlocks& layout, const BlockIds& ids);

void KVFERRY_WRAP_GATHER(const PackedBlocks& layout, const BlockIds& ids) {
  gate().pass();
  KVFERRY_REAL_GATHER(layout, ids);
}
void KVFERRY_WRAP_SCATTER(const PackedBlocks& layout, const BlockIds& ids) {
  gate().pass();
  KVFERRY_REAL_SCATTER(layout, ids);
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
