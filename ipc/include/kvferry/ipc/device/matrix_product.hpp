// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstdint>

namespace kvferry::ipc {

class Stream;

/// C (m x n) = A (m x k) * B (k x n).
struct MatrixShape {
  std::uint64_t m = 0;
  std::uint64_t n = 0;
  std::uint64_t k = 0;
};

/// A product of matrices in device memory of its own, as load for measurements: nobody looks at the
/// result. On CUDA in bfloat16 by cuBLAS, whose library is loaded when it is needed; on a simulated
/// device in single precision. @threading one at a time. @lifetime the device outlives it; streams
/// that it was given to have been seen to end before it ends.
class MatrixProduct {
 public:
  MatrixProduct() = default;
  MatrixProduct(const MatrixProduct&) = delete;
  MatrixProduct& operator=(const MatrixProduct&) = delete;
  virtual ~MatrixProduct() = default;

  /// Computes it once. A stream of another backend is kInvalidArgument.
  [[nodiscard]] virtual Status enqueue(Stream& stream) = 0;
};

}  // namespace kvferry::ipc
