// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What an engine asks of a worker that copies by itself, and what it answers: decoded, then held to
// an arena and a pool. What passes must lie inside them.
#include "bench/copier/messages.hpp"
#include "fuzz.hpp"

namespace kvferry::fuzz {
namespace {

constexpr std::uint64_t kPacked = 1024;

void check(const cli::CopyRequest& request) {
  static const cli::CopyBounds kBounds{{{10, kPacked}, {4, 3 * kPacked}}, 3 * cli::kCopyPieceBytes};
  if (!cli::check_copy_request(request, 7, kBounds)) return;
  KVFERRY_CHECK(
      request.id > 7 && !request.items.empty() && request.items.size() <= cli::kMostCopyItems,
      "a request that is none");
  for (const cli::CopyItem& item : request.items) {
    const auto& group = kBounds.groups.at(item.group.value);
    const std::uint64_t last = item.pool_offset + group.packed_bytes - 1;
    KVFERRY_CHECK(item.block.value < group.block_count, "a block outside the arena");
    KVFERRY_CHECK(item.pool_offset <= last && last < kBounds.pool_bytes,
                  "a place outside the pool");
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  switch (input.byte() % 4) {
    case 0: (void)fuzz::decode_and_check<cli::CopierSetUp>(input.rest()); break;
    case 1: (void)fuzz::decode_and_check<cli::CopierReady>(input.rest()); break;
    case 2: (void)fuzz::decode_and_check<cli::CopyReply>(input.rest()); break;
    default:
      if (const auto request = fuzz::decode_and_check<cli::CopyRequest>(input.rest())) {
        fuzz::check(*request);
      }
  }
  return 0;
}
