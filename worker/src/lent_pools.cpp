// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lent_pools.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace kvferry::worker {

ipc::Result<std::shared_ptr<ipc::PoolMapping>> LentPools::open(ipc::UniqueFd fd,
                                                               std::uint64_t size_bytes) {
  struct stat about = {};
  if (::fstat(fd.get(), &about) != 0) return KVFERRY_ERRNO("look at a pool that a mover lends");
  std::erase_if(known_, [](const Known& known) { return known.mapping.expired(); });
  for (const Known& known : known_) {
    if (known.device != about.st_dev || known.inode != about.st_ino) continue;
    auto mapping = known.mapping.lock();
    if (mapping != nullptr && mapping->size_bytes() == size_bytes) return mapping;
  }
  if (!background_) background_.emplace("kvf-pool");
  KVFERRY_ASSIGN(auto mapping,
                 ipc::PoolMapping::map(device_, std::move(fd), size_bytes, &*background_));
  known_.push_back({about.st_dev, about.st_ino, mapping});
  ipc::log_info("staging: a mover lends its host pool of {}: small swaps go straight there",
                ipc::format_size(size_bytes));
  return mapping;
}

}  // namespace kvferry::worker
