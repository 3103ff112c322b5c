// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvferry::ipc {

/// Contents are summed piece by piece, so that several may share those of one block.
inline constexpr std::size_t kChecksumPieceBytes = std::size_t{128} << 10;

/// Of contents that may be damaged, not of such that somebody forges; never 0, which stands for one
/// that is not known. XXH3-64 of up to one piece; else those of all pieces, joined one by one.
/// Some 10 GB/s on one processor. @threading any.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;
/// Of contents from those of their pieces, in order, all of kChecksumPieceBytes but the last one.
/// @pre at least one.
[[nodiscard]] std::uint64_t combine_checksums(std::span<const std::uint64_t> pieces) noexcept;

}  // namespace kvferry::ipc
