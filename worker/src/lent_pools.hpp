// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/device/pool_mapping.hpp"
#include "kvferry/ipc/os/background.hpp"

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// Host pools that movers have lent to this worker, each mapped once however many connections name
/// it, and given back (in the background) with its last user.
/// @threading one thread. @lifetime the device outlives it; it outlives what it has opened.
class LentPools {
 public:
  explicit LentPools(ipc::Device& device) : device_(device) {}

  /// kInvalidArgument: it is no sealed memory of that size.
  [[nodiscard]] ipc::Result<std::shared_ptr<ipc::PoolMapping>> open(ipc::UniqueFd fd,
                                                                    std::uint64_t size_bytes);

 private:
  struct Known {
    dev_t device = 0;
    ino_t inode = 0;
    std::weak_ptr<ipc::PoolMapping> mapping;
  };

  ipc::Device& device_;
  std::optional<ipc::Background> background_;  ///< Since there was a first one.
  std::vector<Known> known_;
};

}  // namespace kvferry::worker
