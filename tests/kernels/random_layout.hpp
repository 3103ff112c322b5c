// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/block_layout.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace kvferry::kernels {

struct LayoutShape {
  std::uint32_t max_regions = 9;
  std::uint32_t max_slice_bytes = 700;
  std::uint32_t max_blocks = 40;
  std::uint64_t alignment = 1;  ///< Of all sizes and places.
  /// Instead, each region has an alignment of its own for its places, packed ones included.
  bool is_mixed = false;
  std::vector<std::uint64_t> slice_bytes = {};  ///< If any, the only sizes of slices.
};

/// Regions with odd sizes at odd places of one guarded buffer, as no caller would lay them out.
struct RandomLayout {
  explicit RandomLayout(std::uint32_t seed, const LayoutShape& shape = {})
      : random(seed), block_count(draw(std::uint64_t{1}, shape.max_blocks)) {
    const auto region_count = static_cast<std::uint32_t>(draw(std::uint64_t{1}, shape.max_regions));
    std::uint64_t packed = draw(0, 5);
    std::vector<std::uint64_t> starts;
    std::uint64_t at = draw(1, 63) * shape.alignment;
    for (std::uint32_t r = 0; r < region_count; ++r) {
      const std::uint64_t unit = shape.is_mixed ? 1ULL << draw(0, 4) : shape.alignment;
      at = round_up(at, unit);
      if (shape.is_mixed) packed = round_up(packed, unit);
      StridedRegion region;
      region.block_bytes = draw_slice_bytes(shape, unit);
      region.block_stride = round_up(region.block_bytes, unit) + unit * draw(0, 3) * draw(0, 50);
      region.packed_offset = packed;
      region.salt = draw(0, 1000);
      packed += region.block_bytes + draw(0, 9);
      starts.push_back(at);
      at += region.block_stride * block_count + unit * draw(1, 63);
      regions.push_back(region);
    }
    packed_stride = packed + draw(0, 33);
    if (shape.is_mixed && draw(0, 1) == 1) packed_stride = round_up(packed_stride, 16);
    arena.resize(at);
    for (unsigned char& byte : arena) byte = static_cast<unsigned char>(draw(0, 255));
    for (std::uint32_t r = 0; r < region_count; ++r) regions[r].base = arena.data() + starts[r];
  }
  // The regions point into the arena.
  RandomLayout(const RandomLayout&) = delete;
  RandomLayout& operator=(const RandomLayout&) = delete;

  std::uint64_t draw(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(random);
  }

  std::uint32_t draw(int low, int high) {
    return static_cast<std::uint32_t>(
        draw(static_cast<std::uint64_t>(low), static_cast<std::uint64_t>(high)));
  }

  std::uint64_t draw_word() { return draw(std::uint64_t{0}, UINT64_MAX); }

  /// Some different ids in random order.
  std::vector<std::uint32_t> draw_ids() {
    std::vector<std::uint32_t> ids(block_count);
    std::iota(ids.begin(), ids.end(), 0U);
    std::shuffle(ids.begin(), ids.end(), random);
    ids.resize(draw(std::uint64_t{0}, block_count));
    return ids;
  }

  std::uint64_t draw_slice_bytes(const LayoutShape& shape, std::uint64_t unit) {
    if (!shape.slice_bytes.empty()) {
      return shape.slice_bytes[draw(std::uint64_t{0}, shape.slice_bytes.size() - 1)];
    }
    if (draw(1, 5) == 1) return unit * draw(1, 7);
    return unit * draw(std::uint64_t{1}, shape.max_slice_bytes / unit);
  }

  static constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return (value + unit - 1) / unit * unit;
  }

  unsigned char* slice(std::size_t region, std::uint32_t block) {
    return regions[region].base + block * regions[region].block_stride;
  }

  [[nodiscard]] std::uint32_t region_count() const {
    return static_cast<std::uint32_t>(regions.size());
  }

  std::mt19937 random;
  std::uint64_t block_count = 0;
  std::uint64_t packed_stride = 0;
  std::vector<StridedRegion> regions;
  std::vector<unsigned char> arena;
};

}  // namespace kvferry::kernels
