// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// Appends a copy to or from that offset of the pool, as a mover does it: joined to the one before
/// where both sides continue it, cut where a piece of the pool ends, since each is registered by
/// itself.
void append_copy(std::vector<ipc::CopyOp>& ops, ipc::CopyOp copy, std::uint64_t pool_offset);
/// The same for rows, the first of them at that offset; one that crosses from a piece into the next
/// goes as copies.
void append_rows(std::vector<ipc::RowCopyOp>& rows,
                 std::vector<ipc::CopyOp>& ops,
                 ipc::RowCopyOp left,
                 std::uint64_t pool_offset);

}  // namespace kvferry::cli
