// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cuda_runtime_api.h>

#include <array>
#include <climits>
#include <cstddef>
#include <string>

namespace kvferry::ipc::nccl {

// The part of NCCL's binary interface that is used here, stable since its version 2.18: names,
// numbers and layouts of nccl.h (NVIDIA, "NCCL API", docs.nvidia.com/deeplearning/nccl). Declared
// anew, because its library is loaded when it is needed: engines bring one, in different places.

using Comm = struct ncclComm*;

inline constexpr int kSuccess = 0;
inline constexpr int kRemoteError = 6;
inline constexpr int kInProgress = 7;
inline constexpr int kUint8 = 1;  ///< ncclDataType_t.

struct UniqueId {
  std::array<char, 128> internal;
};

/// ncclConfig_t as it was in 2.18: newer libraries know by its size what it lacks.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // "undefined": the library chooses.
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

/// The library's calls. @lifetime for ever, once it is loaded.
struct Library {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank_config)(Comm*, int, UniqueId, int, Config*) = nullptr;
  int (*comm_abort)(Comm) = nullptr;
  int (*comm_get_async_error)(Comm, int*) = nullptr;
  int (*broadcast)(const void*, void*, std::size_t, int, int, Comm, cudaStream_t) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;

  int version = 0;  ///< 22809 for 2.28.9.

  /// kNotFound says where it was looked for; kVersionMismatch for one older than 2.18. Tried once
  /// in a process. @threading any
  [[nodiscard]] static Result<const Library*> load();
  /// "2.28.9".
  [[nodiscard]] std::string version_text() const;
  [[nodiscard]] Error error(int code, const char* what, Comm comm) const;
};

}  // namespace kvferry::ipc::nccl
