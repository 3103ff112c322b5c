// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keyed_hash.hpp"

#include <sodium/crypto_shorthash.h>

namespace kvferry::ipc {

static_assert(sizeof(Digest::bytes) == crypto_shorthash_siphashx24_BYTES);
static_assert(sizeof(Digest::bytes) == crypto_shorthash_siphashx24_KEYBYTES);

Digest keyed_hash(const Digest& key, const void* data, std::size_t size) noexcept {
  Digest hash;
  (void)crypto_shorthash_siphashx24(hash.bytes.data(), static_cast<const unsigned char*>(data),
                                    size, key.bytes.data());
  return hash;
}

}  // namespace kvferry::ipc
