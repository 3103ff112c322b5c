// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/exact_heap.hpp"

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <unistd.h>

#include <cstdlib>

namespace kvferry::soak {

void count_heap_exactly(char** argv) {
  constexpr const char* kVariable = "GLIBC_TUNABLES";
  constexpr const char* kExact = "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1";
  if (ipc::environment(kVariable) == kExact) {
    (void)::unsetenv(kVariable);
    return;
  }
  (void)::setenv(kVariable, kExact, 1);
  (void)::execv("/proc/self/exe", argv);
  throw ipc::Exception(KVFERRY_ERRNO("start this program anew"));
}

}  // namespace kvferry::soak
