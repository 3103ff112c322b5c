// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::cli {

/// Versions of the weights that an RL loop goes round: after so many updates an old identity is
/// back, and finds what was stored under it.
inline constexpr std::uint32_t kWeightsVersions = 3;

/// The weights of one model at one time.
struct WeightsVersion {
  std::filesystem::path file;
  ipc::Digest id;        ///< What they are known by; follows from seed and version.
  std::string lender{};  ///< Where an update by device IPC finds them; empty: nobody lends them.
};

/// A tensor as a file names it.
struct TensorShape {
  std::string name;
  std::string dtype;
  std::uint32_t element_bytes = 1;
  std::vector<std::uint64_t> dimensions;
  [[nodiscard]] std::uint64_t size_bytes() const;
};

/// The tensors of a small model of about so many bytes: of several types, some with rows that can
/// be dealt out evenly to the ranks, some not, one scalar. The same for every version.
[[nodiscard]] std::vector<TensorShape> model_tensors(std::uint64_t total_bytes,
                                                     std::uint32_t ranks);
/// A safetensors file of these tensors, with contents that follow from seed and version alone.
[[nodiscard]] ipc::Status write_weights(const std::filesystem::path& file,
                                        const std::vector<TensorShape>& tensors,
                                        std::uint64_t seed,
                                        std::uint32_t version);
/// Never zero, and different for every seed and version.
[[nodiscard]] ipc::Digest weights_id(std::uint64_t seed, std::uint32_t version);
/// All versions in a folder, which it makes.
[[nodiscard]] ipc::Result<std::vector<WeightsVersion>> write_weights_versions(
    const std::filesystem::path& folder,
    std::uint64_t total_bytes,
    std::uint32_t ranks,
    std::uint64_t seed);

}  // namespace kvferry::cli
