// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/pinned_pieces.hpp"

#include "bench/copier/messages.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cli {

PinnedPieces::PinnedPieces(ipc::Device& device, ipc::SharedMapping mapping)
    : device_(device),
      mapping_(std::move(mapping)),
      registered_((mapping_.size_bytes() + kCopyPieceBytes - 1) / kCopyPieceBytes, false) {}

PinnedPieces::~PinnedPieces() {
  for (std::size_t piece = 0; piece < registered_.size(); ++piece) {
    if (!registered_[piece]) continue;
    const auto status = device_.unregister_host(mapping_.data() + piece * kCopyPieceBytes);
    if (!status) {
      ipc::log_warn("pool piece {} not unregistered: {}", piece, status.error().to_string());
    }
  }
}

ipc::Result<std::byte*> PinnedPieces::pinned(std::uint64_t offset, std::uint64_t size_bytes) {
  const std::uint64_t last = (offset + size_bytes - 1) / kCopyPieceBytes;
  for (std::uint64_t piece = offset / kCopyPieceBytes; piece <= last; ++piece) {
    if (registered_.at(piece)) continue;
    const std::uint64_t start = piece * kCopyPieceBytes;
    KVFERRY_TRY(device_.register_host(mapping_.data() + start,
                                      std::min(kCopyPieceBytes, mapping_.size_bytes() - start)));
    registered_[piece] = true;
  }
  return mapping_.data() + offset;
}

}  // namespace kvferry::cli
