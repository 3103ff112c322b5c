// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/reference_model.hpp"

#include <cuda_runtime_api.h>

#include <cstdint>

/// Launchers of the reference model's kernels. Regions are read from host memory during the call
/// and travel as a kernel parameter; all other addresses are read and written by the device when
/// the kernels run. What is launched depends on the arguments alone, never on what lies at those
/// addresses. Launchers never allocate, synchronise or throw.
/// @threading any, one at a time per stream. @stream ordered in the given stream; nothing has
/// happened yet on return.
namespace kvferry::kernels {

/// Loads the kernels of this header; see load_block_copy().
cudaError_t load_reference_model();

/// Writes and then reads what the pass says; see DecodePass.
cudaError_t launch_decode(const StridedRegion* regions,
                          std::uint32_t region_count,
                          const DecodePass& pass,
                          cudaStream_t stream);

/// sums[i % kModelWords] += fold_term(word i, i, seed) over all words of the source, which may
/// start at any byte.
cudaError_t launch_fold(const unsigned char* source,
                        std::uint64_t size_bytes,
                        std::uint64_t seed,
                        std::uint64_t* sums,
                        cudaStream_t stream);

/// Word j of the target <- expand_word(word j % n of the source, j), n the source's words (a last
/// partial one is padded with zeros), n > 0. Both may start and end at any byte; they do not
/// overlap.
cudaError_t launch_expand(const unsigned char* source,
                          std::uint64_t source_bytes,
                          unsigned char* target,
                          std::uint64_t target_bytes,
                          cudaStream_t stream);

}  // namespace kvferry::kernels
