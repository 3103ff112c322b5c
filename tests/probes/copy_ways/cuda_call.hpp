// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

namespace kvferry::probes {

/// Throws std::runtime_error with the call, its place and the driver's text unless `code` is
/// success.
void must(cudaError_t code, const char* call, const char* file, int line);

}  // namespace kvferry::probes

/// The call of the CUDA runtime must succeed.
#define KVFERRY_PROBE_CUDA(call) ::kvferry::probes::must((call), #call, __FILE__, __LINE__)
