// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Preloaded into a process (LD_PRELOAD), makes what surrounds it odd: environment/odd.hpp. It
// stands between the program and the C library, for our code and that of the libraries alike.
#include "environment/odd.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace {

using kvferry::test::Odd;
using kvferry::test::OddCounts;

constexpr int kPeerPidfd = 77;

struct Settings {
  std::array<bool, kvferry::test::kOddNames.size()> on{};
  OddCounts* counts = nullptr;

  Settings() {
    const char* list = ::getenv(kvferry::test::kOddVariable);
    for (std::size_t i = 0; list != nullptr && i < on.size(); ++i) {
      on[i] = ::strstr(list, kvferry::test::kOddNames[i]) != nullptr;
    }
    const char* file = ::getenv(kvferry::test::kOddCountsVariable);
    const int fd = file == nullptr ? -1 : ::open(file, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void* memory = ::mmap(nullptr, sizeof(OddCounts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) counts = static_cast<OddCounts*>(memory);
    ::close(fd);
  }
};

// Null until the library's constructors have run: what comes earlier is the loader's own.
const Settings* settings = nullptr;
__attribute__((constructor)) void begin() {
  static const Settings made;
  settings = &made;
}

bool is_on(Odd what) { return settings != nullptr && settings->on[static_cast<std::size_t>(what)]; }

void count(Odd what) {
  if (settings->counts != nullptr) ++settings->counts->done[static_cast<std::size_t>(what)];
}

std::uint64_t draw() {
  thread_local std::uint64_t state = [] {
    timespec now{};
    static const auto real =
        reinterpret_cast<int (*)(clockid_t, timespec*)>(::dlsym(RTLD_NEXT, "clock_gettime"));
    real(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_nsec) * 2654435761U + 88172645463325252U;
  }();
  state ^= state << 13U;
  state ^= state >> 7U;
  state ^= state << 17U;
  return state;
}

/// Where the program's own code is, as opposed to its libraries'.
struct Program {
  std::uintptr_t first = 0;
  std::uintptr_t last = 0;
  Program() {
    ::dl_iterate_phdr(
        [](dl_phdr_info* info, size_t /*size*/, void* self) {
          auto* program = static_cast<Program*>(self);
          program->first = info->dlpi_addr;
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            program->last = std::max<std::uintptr_t>(
                program->last,
                info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
          }
          return 1;  // The first one is the program.
        },
        this);
  }
};

/// Polls are interrupted whoever waits. Other calls cannot be while they have nothing to wait for,
/// which libraries rely on: for these only our own code is held to the letter of the manual.
bool interrupt(const void* caller) {
  constexpr std::uint64_t kOneOf = 4;
  if (!is_on(Odd::kEintr)) return false;
  if (caller != nullptr) {
    static const Program program;
    const auto at = reinterpret_cast<std::uintptr_t>(caller);
    if (at < program.first || at >= program.last) return false;
  }
  if (draw() % kOneOf != 0) return false;
  count(Odd::kEintr);
  errno = EINTR;
  return true;
}

template <typename Function> Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// NOLINTBEGIN(cppcoreguidelines-macro-usage): one line for each call, as the C library declares it
#define KVFERRY_INTERRUPTED(type, name, parameters, arguments)       \
  extern "C" type name parameters {                                  \
    static const auto real_##name = real<type(*) parameters>(#name); \
    if (interrupt(__builtin_return_address(0))) return -1;           \
    return real_##name arguments;                                    \
  }
// NOLINTEND(cppcoreguidelines-macro-usage)

extern "C" int poll(pollfd* fds, nfds_t n, int timeout) {
  static const auto real_poll = real<int (*)(pollfd*, nfds_t, int)>("poll");
  return timeout != 0 && interrupt(nullptr) ? -1 : real_poll(fds, n, timeout);
}

extern "C" int epoll_wait(int fd, epoll_event* events, int most, int timeout) {
  static const auto real_wait = real<int (*)(int, epoll_event*, int, int)>("epoll_wait");
  return timeout != 0 && interrupt(nullptr) ? -1 : real_wait(fd, events, most, timeout);
}

KVFERRY_INTERRUPTED(ssize_t, read, (int fd, void* data, size_t size), (fd, data, size))
KVFERRY_INTERRUPTED(ssize_t, write, (int fd, const void* data, size_t size), (fd, data, size))
KVFERRY_INTERRUPTED(ssize_t,
                    pread,
                    (int fd, void* data, size_t size, off_t at),
                    (fd, data, size, at))
KVFERRY_INTERRUPTED(ssize_t,
                    pwrite,
                    (int fd, const void* data, size_t size, off_t at),
                    (fd, data, size, at))
KVFERRY_INTERRUPTED(ssize_t,
                    recv,
                    (int fd, void* data, size_t size, int flags),
                    (fd, data, size, flags))
KVFERRY_INTERRUPTED(ssize_t,
                    send,
                    (int fd, const void* data, size_t size, int flags),
                    (fd, data, size, flags))
KVFERRY_INTERRUPTED(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags))
KVFERRY_INTERRUPTED(ssize_t,
                    sendmsg,
                    (int fd, const msghdr* message, int flags),
                    (fd, message, flags))
KVFERRY_INTERRUPTED(int,
                    accept4,
                    (int fd, sockaddr* address, socklen_t* size, int flags),
                    (fd, address, size, flags))
KVFERRY_INTERRUPTED(int, flock, (int fd, int operation), (fd, operation))
KVFERRY_INTERRUPTED(int, ftruncate, (int fd, off_t size), (fd, size))
KVFERRY_INTERRUPTED(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size))
KVFERRY_INTERRUPTED(pid_t, waitpid, (pid_t pid, int* status, int options), (pid, status, options))
KVFERRY_INTERRUPTED(int,
                    waitid,
                    (idtype_t type, id_t id, siginfo_t* info, int options),
                    (type, id, info, options))
KVFERRY_INTERRUPTED(ssize_t,
                    getrandom,
                    (void* data, size_t size, unsigned flags),
                    (data, size, flags))

extern "C" int open(const char* path, int flags, ...) {
  static const auto real_open = real<int (*)(const char*, int, ...)>("open");
  std::va_list rest;
  va_start(rest, flags);
  const mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  if (interrupt(__builtin_return_address(0))) return -1;
  return real_open(path, flags, mode);
}

extern "C" int getsockopt(int fd, int level, int option, void* value, socklen_t* size) {
  static const auto real_one = real<int (*)(int, int, int, void*, socklen_t*)>("getsockopt");
  if (is_on(Odd::kOldKernel) && level == SOL_SOCKET && option == kPeerPidfd) {
    count(Odd::kOldKernel);
    errno = ENOPROTOOPT;
    return -1;
  }
  return real_one(fd, level, option, value, size);
}

extern "C" int clock_gettime(clockid_t clock, timespec* now) {
  static const auto real_one = real<int (*)(clockid_t, timespec*)>("clock_gettime");
  const int result = real_one(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME && is_on(Odd::kClock)) {
    constexpr std::uint64_t kDay = 86'400;
    now->tv_sec += static_cast<time_t>(draw() % (2 * kDay)) - static_cast<time_t>(kDay);
    count(Odd::kClock);
  }
  return result;
}

extern "C" int gettimeofday(timeval* now, void* /*zone*/) {
  timespec time{};
  const int result = ::clock_gettime(CLOCK_REALTIME, &time);
  *now = {time.tv_sec, static_cast<suseconds_t>(time.tv_nsec / 1000)};
  return result;
}

extern "C" time_t time(time_t* out) {
  timespec now{};
  (void)::clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}
