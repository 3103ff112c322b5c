// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cuda_runtime_api.h>

namespace kvferry::ipc::cublas {

// The part of cuBLAS's binary interface that is used here, stable since CUDA 11: names and numbers
// of cublas_api.h and library_types.h (NVIDIA, "cuBLAS", docs.nvidia.com/cuda/cublas). Declared
// anew, because its library is loaded when it is needed.

using Handle = struct cublasContext*;

inline constexpr int kSuccess = 0;
inline constexpr int kNotTransposed = 0;
inline constexpr int kBfloat16 = 14;      ///< CUDA_R_16BF.
inline constexpr int kCompute32F = 68;    ///< CUBLAS_COMPUTE_32F.
inline constexpr int kAnyAlgorithm = -1;  ///< CUBLAS_GEMM_DEFAULT.

/// The library's calls. @lifetime for ever, once it is loaded.
struct Library {
  int (*create)(Handle*) = nullptr;
  int (*destroy)(Handle) = nullptr;
  int (*set_stream)(Handle, cudaStream_t) = nullptr;
  int (*gemm_ex)(Handle,
                 int transposed_a,
                 int transposed_b,
                 int m,
                 int n,
                 int k,
                 const void* alpha,
                 const void* a,
                 int type_a,
                 int row_a,
                 const void* b,
                 int type_b,
                 int row_b,
                 const void* beta,
                 void* c,
                 int type_c,
                 int row_c,
                 int compute,
                 int algorithm) = nullptr;

  /// kNotFound says where it was looked for. Tried once in a process. @threading any
  [[nodiscard]] static Result<const Library*> load();
};

}  // namespace kvferry::ipc::cublas
