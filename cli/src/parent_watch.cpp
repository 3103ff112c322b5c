// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "parent_watch.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <thread>

namespace kvferry::cli {
namespace {

constexpr int kGraceMs = 3000;

void watch_parent(int pipe_fd) {
  pthread_setname_np(pthread_self(), "kvf-parent");
  pollfd end{pipe_fd, POLLIN, 0};
  // wait-idle: the end of the process that started this one; that end, which closes the pipe;
  // thread kvf-parent
  while (poll(&end, 1, -1) < 0 && errno == EINTR) {
  }
  ipc::log_warn("the process that started this one is gone; ending");
  kill(getpid(), SIGTERM);
  // wait: the orderly end of this process, which the last line ends else; kGraceMs; that end
  poll(nullptr, 0, kGraceMs);
  ipc::log_error("still here {} ms after SIGTERM; ending at once", kGraceMs);
  kill(getpid(), SIGKILL);
}

}  // namespace

void end_with_parent(int pipe_fd) {
  // The watcher must never be the thread that a signal is delivered to: it has all of them blocked.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // wait-none: nobody waits for the end of this thread
  std::thread(watch_parent, pipe_fd).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace kvferry::cli
