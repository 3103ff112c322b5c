// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/piece_copies.hpp"

#include "bench/copier/messages.hpp"

#include <algorithm>
#include <cstddef>

namespace kvferry::cli {
namespace {

std::uint64_t to_end_of_piece(std::uint64_t pool_offset) {
  return kCopyPieceBytes - pool_offset % kCopyPieceBytes;
}

}  // namespace

void append_copy(std::vector<ipc::CopyOp>& ops, ipc::CopyOp copy, std::uint64_t pool_offset) {
  while (copy.size_bytes > 0) {
    const std::uint64_t size_bytes = std::min(copy.size_bytes, to_end_of_piece(pool_offset));
    auto* host = static_cast<std::byte*>(copy.host);
    const bool continues =
        !ops.empty() && pool_offset % kCopyPieceBytes != 0 &&
        static_cast<std::byte*>(ops.back().host) + ops.back().size_bytes == host &&
        ops.back().device + ops.back().size_bytes == copy.device;
    if (continues) {
      ops.back().size_bytes += size_bytes;
    } else {
      ops.push_back({host, copy.device, size_bytes});
    }
    copy.host = host + size_bytes;
    copy.device = copy.device + size_bytes;
    copy.size_bytes -= size_bytes;
    pool_offset += size_bytes;
  }
}

void append_rows(std::vector<ipc::RowCopyOp>& rows,
                 std::vector<ipc::CopyOp>& ops,
                 ipc::RowCopyOp left,
                 std::uint64_t pool_offset) {
  while (left.rows > 0) {
    const std::uint64_t room = to_end_of_piece(pool_offset);
    std::uint64_t count = 1;
    if (left.row_bytes <= room) {
      if (left.rows > 1) count = std::min(left.rows, 1 + (room - left.row_bytes) / left.host_pitch);
      rows.push_back(left);
      rows.back().rows = count;
    } else {
      append_copy(ops, {left.host, left.device, left.row_bytes}, pool_offset);
    }
    left.host = static_cast<std::byte*>(left.host) + count * left.host_pitch;
    left.device = left.device + count * left.device_pitch;
    left.rows -= count;
    pool_offset += count * left.host_pitch;
  }
}

}  // namespace kvferry::cli
