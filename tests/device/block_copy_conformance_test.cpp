// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Gather and scatter against loops that say what they should do: every byte that is a slice's, and
// no other one, whatever the layout.
#include "device_fixture.hpp"
#include "kernels/random_layout.hpp"
#include "kvferry/kernels/block_layout.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <vector>

namespace kvferry::ipc {
namespace {

using kernels::LayoutShape;
using kernels::RandomLayout;
using kernels::StridedRegion;

/// Of arena and ring, which the largest layout fits.
constexpr std::uint64_t kRoom = 32 * kMiB;
/// What a launch of the kernels takes at the most (kernels/src/region_batch.hpp).
constexpr std::size_t kRegionsPerLaunch = 384;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

class BlockCopyConformanceTest : public DeviceConformanceTest {
 protected:
  void SetUp() override {
    DeviceConformanceTest::SetUp();
    if (device_ == nullptr) return;
    memory_ = allocate(kRoom);
    ASSERT_NE(memory_, nullptr);
    transfer_ = pinned(kRoom);
    pinned_ring_ = pinned(kRoom);
  }

  /// A layout's arena with a ring of packed blocks behind it, and other bytes behind that.
  void lay_out(RandomLayout& layout) {
    ids_ = layout.draw_ids();
    const auto last = static_cast<std::uint32_t>(layout.block_count - 1);
    if (std::find(ids_.begin(), ids_.end(), last) == ids_.end()) {
      const auto at = layout.draw(std::uint64_t{0}, ids_.size());
      ids_.insert(ids_.begin() + static_cast<std::ptrdiff_t>(at), last);
    }
    constexpr std::uint64_t kGuard = 4099;
    is_straight_ = layout.draw(0, 1) == 1;
    ring_at_ = round_up(layout.arena.size(), 16);
    packed_at_ = ring_at_ + 64 + layout.draw(0, 1) * layout.draw(0, 15);
    expected_.resize(packed_at_ + layout.packed_stride * ids_.size() + kGuard);
    std::memcpy(expected_.data(), layout.arena.data(), layout.arena.size());
    scramble(layout.arena.size());
    regions_ = layout.regions;
    for (StridedRegion& region : regions_) {
      const std::uint64_t offset = offset_in(layout, region);
      region.base = static_cast<unsigned char*>((memory_->address() + offset).raw());
    }
  }
  void scramble(std::uint64_t first) {
    for (std::uint64_t i = first; i < expected_.size(); ++i) {
      expected_[i] = static_cast<unsigned char>(random_());
    }
  }
  static std::uint64_t offset_in(const RandomLayout& layout, const StridedRegion& region) {
    return static_cast<std::uint64_t>(region.base - layout.arena.data());
  }

  /// Device and ring are as expected.
  void put() {
    std::memcpy(transfer_->data(), expected_.data(), expected_.size());
    copy(CopyDirection::kHostToDevice, transfer_->data(), memory_->address(), expected_.size());
    const std::uint64_t tail = expected_.size() - ring_at_;
    if (is_straight_) std::memcpy(pinned_ring_->data(), expected_.data() + ring_at_, tail);
  }
  void expect_all() {
    std::memset(transfer_->data(), 0, expected_.size());
    copy(CopyDirection::kDeviceToHost, transfer_->data(), memory_->address(), expected_.size());
    const std::uint64_t tail = expected_.size() - ring_at_;
    if (is_straight_) std::memcpy(transfer_->data() + ring_at_, pinned_ring_->data(), tail);
    const auto* seen = reinterpret_cast<const unsigned char*>(transfer_->data());
    const auto wrong = std::mismatch(expected_.begin(), expected_.end(), seen);
    ASSERT_EQ(wrong.first, expected_.end())
        << "byte " << wrong.first - expected_.begin() << "; the ring begins at " << packed_at_;
  }
  [[nodiscard]] DevicePtr packed() const {
    const DevicePtr pinned{reinterpret_cast<std::uintptr_t>(pinned_ring_->data())};
    return is_straight_ ? pinned + (packed_at_ - ring_at_) : memory_->address() + packed_at_;
  }

  /// What should happen, slice by slice.
  template <typename Each> void for_each_slice(const RandomLayout& layout, Each each) {
    for (std::size_t i = 0; i < ids_.size(); ++i) {
      for (const StridedRegion& region : layout.regions) {
        each(offset_in(layout, region) + ids_[i] * region.block_stride,
             packed_at_ + i * layout.packed_stride + region.packed_offset, region.block_bytes);
      }
    }
  }

  std::mt19937_64 random_{17};
  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<PinnedBuffer> transfer_;
  std::unique_ptr<PinnedBuffer> pinned_ring_;
  bool is_straight_ = false;  ///< Packed blocks are in pinned host memory, not on the device.
  std::uint64_t ring_at_ = 0;
  std::uint64_t packed_at_ = 0;
  std::vector<std::uint32_t> ids_;
  std::vector<StridedRegion> regions_;  ///< On the device.
  std::vector<unsigned char> expected_;
};

TEST_P(BlockCopyConformanceTest, MovesEverySliceAndNothingElseOverRandomLayouts) {
  constexpr std::uint32_t kLayouts = 42;
  // 512 bytes of scales beside pages of 64 KiB, and both sides of the 8 KiB that a warp takes.
  const std::vector<std::uint64_t> pages = {1, 3, 7, 24, 512, 8191, 8192, 8200, 16'388, 65'536};
  const std::array<LayoutShape, 7> shapes = {
      LayoutShape{},                     // odd everything
      LayoutShape{9, 700, 40, 1, true},  // every alignment in one layout
      LayoutShape{3, 20'000, 9, 1},      // more than one piece of work per slice
      LayoutShape{12, 0, 12, 1, true, pages},
      LayoutShape{12, 0, 12, 16, false, {512, 65'536}},
      LayoutShape{900, 60, 3, 1, true},   // more regions than one launch takes
      LayoutShape{3, 60, 900, 1, true}};  // more blocks than one launch takes
  std::map<std::uint64_t, std::size_t> by_alignment;
  std::size_t most_regions = 0;
  std::size_t most_blocks = 0;
  for (std::uint32_t seed = 0; seed < kLayouts; ++seed) {
    SCOPED_TRACE(testing::Message() << "layout of seed " << seed);
    RandomLayout layout(seed, shapes[seed % shapes.size()]);
    lay_out(layout);
    ASSERT_LE(expected_.size(), kRoom);
    auto table = device_->make_region_table(regions_);
    ASSERT_TRUE(table.has_value());
    stream_->limit_thread_blocks(layout.draw(1, 40));

    ASSERT_NO_FATAL_FAILURE(put());
    ASSERT_TRUE(stream_->gather(**table, ids_, packed(), layout.packed_stride).has_value());
    finish();
    for_each_slice(layout, [&](std::uint64_t slice, std::uint64_t dense, std::uint64_t size) {
      std::memcpy(expected_.data() + dense, expected_.data() + slice, size);
      const std::uint64_t bits = slice | dense | size | 16;
      ++by_alignment[bits & (~bits + 1)];
    });
    ASSERT_NO_FATAL_FAILURE(expect_all()) << "after the gather";

    scramble(ring_at_);
    ASSERT_NO_FATAL_FAILURE(put());
    ASSERT_TRUE(stream_->scatter(**table, ids_, packed(), layout.packed_stride).has_value());
    finish();
    for_each_slice(layout, [&](std::uint64_t slice, std::uint64_t dense, std::uint64_t size) {
      std::memcpy(expected_.data() + slice, expected_.data() + dense, size);
    });
    ASSERT_NO_FATAL_FAILURE(expect_all()) << "after the scatter";
    most_regions = std::max(most_regions, regions_.size());
    most_blocks = std::max(most_blocks, ids_.size());
  }
  // A kernel takes the widest access that slice, packed place and size allow: all were needed.
  EXPECT_THAT(by_alignment, testing::SizeIs(5));
  EXPECT_GT(most_regions, kRegionsPerLaunch);
  EXPECT_GT(most_blocks, kernels::kMaxBlocksPerLaunch);
}

/// Those pages of a large memory that are looked at, one behind the other.
class Pages {
 public:
  static constexpr std::uint64_t kPage = 4096;

  /// The pages of these bytes, and one before and one behind them.
  void touch(std::uint64_t at, std::uint64_t size) {
    const std::uint64_t first = at / kPage == 0 ? 0 : at / kPage - 1;
    for (std::uint64_t page = first; page <= (at + size) / kPage + 1; ++page) places_[page] = 0;
  }
  /// No more are touched.
  std::uint64_t arrange() {
    std::uint64_t next = 0;
    for (auto& [page, place] : places_) place = kPage * next++;
    return kPage * next;
  }
  [[nodiscard]] std::uint64_t place(std::uint64_t at) const {
    return places_.at(at / kPage) + at % kPage;
  }
  [[nodiscard]] std::vector<CopyOp> ops(std::byte* image, DevicePtr memory) const {
    std::vector<CopyOp> ops;
    for (const auto& [page, place] : places_) {
      ops.push_back({image + place, memory + page * kPage, kPage});
    }
    return ops;
  }

 private:
  std::map<std::uint64_t, std::uint64_t> places_;  ///< By the page's number.
};

/// One of a large memory: all in bytes from its begin.
struct FarRegion {
  std::uint64_t base;
  std::uint64_t stride;
  std::uint64_t bytes;
};

// Where 32 bits would not do: bases, block_id * block_stride, and the way of a packed block.
TEST_P(BlockCopyConformanceTest, ReachesWhatLiesBeyondFourGibibytes) {
  constexpr std::uint64_t kGiB = 1024 * kMiB;
  constexpr std::uint64_t kSize = 9 * kGiB;
  constexpr std::uint64_t kPackedAt = 4 * kGiB + 257 * kMiB;
  constexpr std::uint64_t kPackedStride = 512 * kMiB + 8;
  constexpr std::uint64_t kLow = 0xFFFF'FFFF;
  const std::array<FarRegion, 3> places = {
      FarRegion{77, 96 * kMiB + 8, 1001}, FarRegion{8 * kGiB + 512 * kMiB, 65'536, 65'536},
      FarRegion{4 * kGiB - 3 * 516, 516, 512},  // its block 3 is the first one beyond
  };
  const std::vector<std::uint32_t> ids = {90, 0, 45, 44, 2, 3, 89, 1, 60};
  ASSERT_GT(90 * places[0].stride, 8 * kGiB);
  ASSERT_GT((ids.size() - 1) * kPackedStride, 4 * kGiB);

  std::unique_ptr<Device> device = open_device(*DeviceSpec::parse(large_device_text()));
  auto memory = device->allocate(kSize, GetParam(), nullptr);
  ASSERT_TRUE(memory.has_value()) << memory.error().to_string();
  auto stream = device->make_stream(StreamPriority::kNormal);
  ASSERT_TRUE(stream.has_value());
  stream_ = std::move(stream).value();
  std::vector<StridedRegion> regions;
  std::uint64_t packed_offset = 0;
  for (const FarRegion& place : places) {
    packed_offset = round_up(packed_offset, 8);
    auto* const base = static_cast<unsigned char*>(((*memory)->address() + place.base).raw());
    regions.push_back({base, place.stride, place.bytes, packed_offset, 0});
    packed_offset += place.bytes;
  }
  auto table = device->make_region_table(regions);
  ASSERT_TRUE(table.has_value());

  const auto for_each_slice = [&](auto each) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      for (std::size_t r = 0; r < places.size(); ++r) {
        const std::uint64_t way = ids[i] * places[r].stride;
        each(places[r].base, way, kPackedAt + i * kPackedStride + regions[r].packed_offset,
             places[r].bytes);
      }
    }
  };
  // And where the bytes would go if some number was cut off.
  Pages pages;
  for_each_slice(
      [&](std::uint64_t base, std::uint64_t way, std::uint64_t dense, std::uint64_t size) {
        ASSERT_LE(std::max(base + way, dense) + size + 2 * Pages::kPage, kSize);
        for (const std::uint64_t at : {base + way, base + (way & kLow), (base + way) & kLow, dense,
                                       dense & kLow, kPackedAt + ((dense - kPackedAt) & kLow)}) {
          pages.touch(at, size);
        }
      });
  const std::uint64_t bytes = pages.arrange();
  const auto image = pinned(bytes);
  std::vector<std::byte> expected(bytes);
  const auto ops = pages.ops(image->data(), (*memory)->address());
  const auto put = [&] {
    for (std::byte& byte : expected) byte = std::byte(random_());
    std::memcpy(image->data(), expected.data(), bytes);
    ASSERT_TRUE(stream_->copy(CopyDirection::kHostToDevice, ops, CopyMode::kBatch).has_value());
    finish();
  };
  const auto expect_all = [&] {
    ASSERT_TRUE(stream_->copy(CopyDirection::kDeviceToHost, ops, CopyMode::kBatch).has_value());
    finish();
    const auto wrong = std::mismatch(expected.begin(), expected.end(), image->data());
    ASSERT_EQ(wrong.first, expected.end()) << "byte " << wrong.first - expected.begin();
  };
  const DevicePtr packed = (*memory)->address() + kPackedAt;

  ASSERT_NO_FATAL_FAILURE(put());
  ASSERT_TRUE(stream_->gather(**table, ids, packed, kPackedStride).has_value());
  finish();
  for_each_slice(
      [&](std::uint64_t base, std::uint64_t way, std::uint64_t dense, std::uint64_t size) {
        for (std::uint64_t b = 0; b < size; ++b) {
          expected[pages.place(dense + b)] = expected[pages.place(base + way + b)];
        }
      });
  ASSERT_NO_FATAL_FAILURE(expect_all()) << "after the gather";

  ASSERT_NO_FATAL_FAILURE(put());
  ASSERT_TRUE(stream_->scatter(**table, ids, packed, kPackedStride).has_value());
  finish();
  for_each_slice(
      [&](std::uint64_t base, std::uint64_t way, std::uint64_t dense, std::uint64_t size) {
        for (std::uint64_t b = 0; b < size; ++b) {
          expected[pages.place(base + way + b)] = expected[pages.place(dense + b)];
        }
      });
  ASSERT_NO_FATAL_FAILURE(expect_all()) << "after the scatter";
  stream_.reset();
  ASSERT_TRUE((*memory)->release().has_value());
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         BlockCopyConformanceTest,
                         testing::Values(HandleKind::kVmm, HandleKind::kLegacy),
                         [](const auto& handles) { return std::string(to_string(handles.param)); });

}  // namespace
}  // namespace kvferry::ipc
