// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/contents.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace kvferry::probes {
namespace {

/// Not the first one: its addresses are right even when those of calls do not advance.
constexpr std::uint64_t kCheckedCall = 3;
constexpr std::byte kPoison{0xA5};

/// Bytes that say which piece and which word of it they are (the finaliser of SplitMix64).
std::vector<std::byte> pattern_of(std::size_t piece, std::size_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  for (std::size_t at = 0; at < size_bytes; at += sizeof(std::uint64_t)) {
    std::uint64_t word = (std::uint64_t{piece} << 32U) + at + 0x9E3779B97F4A7C15U;
    word = (word ^ (word >> 30U)) * 0xBF58476D1CE4E5B9U;
    word = (word ^ (word >> 27U)) * 0x94D049BB133111EBU;
    word ^= word >> 31U;
    std::memcpy(bytes.data() + at, &word, sizeof(word));
  }
  return bytes;
}

void check_lane(const Lane& lane, Direction direction) {
  const std::vector<Piece> pieces = lane.way->pieces(kCheckedCall);
  const std::vector<std::byte> poison(pieces.front().size_bytes, kPoison);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const CopyEnds ends = ends_of(pieces[i], direction);
    const std::vector<std::byte> pattern = pattern_of(i, pieces[i].size_bytes);
    KVFERRY_PROBE_CUDA(cudaMemcpy(ends.from, pattern.data(), pattern.size(), cudaMemcpyDefault));
    KVFERRY_PROBE_CUDA(cudaMemcpy(ends.to, poison.data(), poison.size(), cudaMemcpyDefault));
  }
  // Copies of pageable memory may return before they have arrived.
  KVFERRY_PROBE_CUDA(cudaDeviceSynchronize());

  lane.way->enqueue(kCheckedCall, lane.stream.get());
  KVFERRY_PROBE_CUDA(cudaStreamSynchronize(lane.stream.get()));

  std::vector<std::byte> found(pieces.front().size_bytes);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::byte* copied = ends_of(pieces[i], direction).to;
    KVFERRY_PROBE_CUDA(cudaMemcpy(found.data(), copied, found.size(), cudaMemcpyDefault));
    const std::vector<std::byte> pattern = pattern_of(i, found.size());
    const auto wrong = std::mismatch(pattern.begin(), pattern.end(), found.begin());
    if (wrong.first != pattern.end()) {
      throw std::runtime_error(fmt::format(
          "wrong contents: piece {} of {}, byte {}: {:#04x}, expected {:#04x}", i, pieces.size(),
          wrong.first - pattern.begin(), std::to_integer<unsigned>(*wrong.second),
          std::to_integer<unsigned>(*wrong.first)));
    }
  }
}

}  // namespace

void check_contents(const std::vector<Lane>& lanes, Direction direction) {
  for (const Lane& lane : lanes) {
    check_lane(lane, direction);
  }
}

}  // namespace kvferry::probes
