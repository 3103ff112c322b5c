// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstddef>

namespace kvferry::ipc {

/// SipHash-2-4 with 128 bits (Aumasson, Bernstein, "SipHash: a fast short-input PRF", 2012): who
/// does not know the key cannot tell its values from random ones, however many he sees. Some 30 ns
/// for a short input. Digest::hash() is faster, and promises nothing of the kind.
[[nodiscard]] Digest keyed_hash(const Digest& key, const void* data, std::size_t size) noexcept;

}  // namespace kvferry::ipc
