// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/block_key.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry::test {

/// The hashes of a prefix of so many blocks. Those of one seed begin alike, others have none in
/// common.
inline std::vector<ipc::Digest> prefix_hashes(std::uint64_t seed, std::size_t blocks) {
  std::vector<ipc::Digest> hashes;
  ipc::Digest parent;
  for (std::uint64_t i = 0; i < blocks; ++i) {
    const std::uint64_t tokens = seed * 1'000'000 + i;
    parent = ipc::chain_block_hash(parent, &tokens, sizeof(tokens));
    hashes.push_back(parent);
  }
  return hashes;
}

}  // namespace kvferry::test
