// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/slice_rows.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using Slice = BlockParts::Slice;
using SliceRows = BlockParts::SliceRows;

/// How far behind a slice its successor is looked for, among its like: as many kinds may take turns
/// in the arena or in the part (K before V of a layer, all K before all V, …).
constexpr std::size_t kLookAhead = 8;

/// What the rows of one copy have in common.
auto likeness(const Slice& slice) {
  return std::tie(slice.replicated, slice.segment, slice.size_bytes, slice.block_stride);
}

/// Slices that touch in the arena and in their part, as all of a block-first arena do.
std::vector<Slice> join_touching(std::span<const Slice> slices) {
  std::vector<Slice> joined;
  for (const Slice& slice : slices) {
    Slice* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->replicated == slice.replicated && last->segment == slice.segment &&
        last->block_stride == slice.block_stride &&
        last->offset + last->size_bytes == slice.offset &&
        last->part_offset + last->size_bytes == slice.part_offset) {
      last->size_bytes += slice.size_bytes;
    } else {
      joined.push_back(slice);
    }
  }
  return joined;
}

/// Like slices, in the order of their part, and which of them are in rows already.
class LikeSlices {
 public:
  void add(const Slice& slice) {
    places_.emplace(std::pair(slice.offset, slice.part_offset), slices_.size());
    slices_.push_back(slice);
    taken_.push_back(false);
  }

  void take_rows(std::vector<SliceRows>& all) {
    for (std::size_t first = 0; first < slices_.size(); ++first) {
      if (taken_[first]) continue;
      SliceRows best{slices_[first], 0, 0, 1};
      const std::size_t last = std::min(slices_.size(), first + 1 + kLookAhead);
      for (std::size_t second = first + 1; second < last; ++second) {
        const SliceRows rows = follow(first, second);
        if (rows.rows > best.rows) best = rows;
      }
      for (std::uint64_t row = 0; row < best.rows; ++row) taken_[at(best, row)->second] = true;
      all.push_back(best);
    }
  }

 private:
  using Places = std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t>;

  [[nodiscard]] Places::const_iterator at(const SliceRows& rows, std::uint64_t row) const {
    return places_.find({rows.first.offset + row * rows.device_pitch,
                         rows.first.part_offset + row * rows.part_pitch});
  }

  /// Whatever follows the first two at their distance.
  [[nodiscard]] SliceRows follow(std::size_t first, std::size_t second) const {
    const Slice& one = slices_[first];
    const Slice& two = slices_[second];
    SliceRows rows{one, 0, 0, 1};
    // A strided copy's rows lie apart, and go up on both sides.
    if (taken_[second] || two.offset < one.offset + one.size_bytes) return rows;
    rows.device_pitch = two.offset - one.offset;
    rows.part_pitch = two.part_offset - one.part_offset;
    for (;; ++rows.rows) {
      const auto next = at(rows, rows.rows);
      if (next == places_.end() || taken_[next->second]) return rows;
    }
  }

  std::vector<Slice> slices_;
  std::vector<bool> taken_;
  Places places_;
};

}  // namespace

std::vector<SliceRows> find_slice_rows(std::span<const Slice> slices) {
  std::vector<Slice> joined = join_touching(slices);
  std::stable_sort(joined.begin(), joined.end(),
                   [](const Slice& a, const Slice& b) { return likeness(a) < likeness(b); });
  std::vector<SliceRows> all;
  for (std::size_t next = 0; next < joined.size();) {
    LikeSlices like;
    const Slice& first = joined[next];
    for (; next < joined.size() && likeness(joined[next]) == likeness(first); ++next) {
      like.add(joined[next]);
    }
    like.take_rows(all);
  }
  // In the order of the block's parts, so that what touches across rows can still be joined.
  std::stable_sort(all.begin(), all.end(), [](const SliceRows& a, const SliceRows& b) {
    return a.first.packed_offset < b.first.packed_offset;
  });
  return all;
}

}  // namespace kvferry::cache_manager
