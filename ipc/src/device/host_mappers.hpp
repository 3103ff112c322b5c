// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_ledger.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::ipc {

/// A living process that maps a memory object.
struct Mapper {
  pid_t pid = 0;
  std::string command;
  std::uint64_t mapped_bytes = 0;
};

/// All living processes that map the object, as far as this user may look; read from
/// /proc/PID/maps. Includes the calling process and children that inherited a mapping by fork.
[[nodiscard]] Result<std::vector<Mapper>> find_mappers(ObjectId object);

}  // namespace kvferry::ipc
