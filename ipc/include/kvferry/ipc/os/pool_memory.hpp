// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <cstdint>

namespace kvferry::ipc {

/// A host pool and the catalogue of what is in it, as descriptors: the memory lives for as long as
/// anybody has one of them. @threading one at a time.
struct PoolMemory {
  Digest id;  ///< Names it over the lives of its managers; zero: there is none.
  std::uint64_t pool_bytes = 0;
  std::uint64_t catalogue_bytes = 0;  ///< 0: nobody can tell later what is in the pool.
  UniqueFd pool;
  UniqueFd catalogue;

  [[nodiscard]] bool valid() const noexcept { return pool.valid(); }
  /// Descriptors of its own, of the same memory.
  [[nodiscard]] Result<PoolMemory> duplicate() const;
};

/// Both are descriptors of one memory object.
[[nodiscard]] bool is_same_memory(const UniqueFd& a, const UniqueFd& b) noexcept;

}  // namespace kvferry::ipc
