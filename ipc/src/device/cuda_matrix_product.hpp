// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/device/matrix_product.hpp"

#include <memory>

namespace kvferry::ipc {

/// Device::make_product() of a CUDA device.
[[nodiscard]] Result<std::unique_ptr<MatrixProduct>> make_cuda_matrix_product(
    Device& device, ContextPtr context, const MatrixShape& shape);

}  // namespace kvferry::ipc
