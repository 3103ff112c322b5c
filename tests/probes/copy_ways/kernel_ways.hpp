// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/way.hpp"

#include <cstdint>
#include <memory>

/// Ways that kernels copy by: into the ring, or straight to and from host memory.
namespace kvferry::probes {

enum class KernelCopy {
  kPlain,  ///< loads and stores
  kBulk,   ///< bulk copies of the tensor memory accelerator
};

/// How a kernel uses the device.
struct KernelShape {
  KernelCopy copy = KernelCopy::kPlain;
  unsigned thread_blocks = 1;
  unsigned warps = 1;    ///< of a thread block; kBulk has one
  double pace_gbps = 0;  ///< of a thread block; 0: as fast as it can
};

std::unique_ptr<Way> kernel_copy(const BlockSequence& blocks,
                                 Direction direction,
                                 const KernelShape& shape,
                                 std::uint64_t first_block = 0);

}  // namespace kvferry::probes
