// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/block_key.hpp"

#include "model/canonical.hpp"

#include <array>
#include <cstring>

namespace kvferry::ipc {

Digest ModelIdentity::root() const {
  model::Canonical canonical("kvferry root 1");
  canonical.text(name_space);
  canonical.text(model);
  canonical.digest(fingerprint);
  canonical.digest(weights);
  if (unit_blocks != 1) canonical.number(unit_blocks);
  return name_space_key ? canonical.keyed_digest(*name_space_key) : canonical.digest();
}

Digest combine_weights(std::span<const Digest> weights) {
  model::Canonical canonical("kvferry weights 1");
  Digest one;
  bool several = false;
  for (const Digest& part : weights) {
    if (part.is_zero()) continue;
    several = several || (!one.is_zero() && part != one);
    one = part;
    canonical.digest(part);
  }
  return several ? canonical.digest() : one;
}

Digest chain_block_hash(const Digest& parent, const void* tokens, std::size_t size_bytes) {
  // Two steps over a fixed buffer, so that the per-block path allocates nothing; the token digest
  // covers their length.
  const Digest own = Digest::hash(size_bytes == 0 ? "" : tokens, size_bytes);
  std::array<std::uint8_t, sizeof(parent.bytes) + sizeof(own.bytes)> link{};
  std::memcpy(link.data(), parent.bytes.data(), parent.bytes.size());
  std::memcpy(link.data() + parent.bytes.size(), own.bytes.data(), own.bytes.size());
  return Digest::hash(link.data(), link.size());
}

}  // namespace kvferry::ipc
