// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/cuda_call.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <stdexcept>

namespace kvferry::probes {

void must(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) {
    return;
  }
  cudaGetLastError();  // or the next call that looks for one finds this one again
  throw std::runtime_error(fmt::format("{} at {}:{}: {} ({})", call,
                                       std::filesystem::path(file).filename().string(), line,
                                       cudaGetErrorString(code), cudaGetErrorName(code)));
}

}  // namespace kvferry::probes
