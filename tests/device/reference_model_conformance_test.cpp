// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/device_fixture.hpp"
#include "kernels/random_pass.hpp"
#include "kvferry/kernels/host_twins.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <vector>

// The reference model and recorded work, which must do the same on every backend.
namespace kvferry::ipc {
namespace {

using kernels::DecodePass;
using kernels::kModelWords;
using kernels::LayoutShape;
using kernels::RandomLayout;
using kernels::RandomPass;

template <typename T> T* at(DevicePtr address) { return static_cast<T*>(address.raw()); }

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::uint64_t size) {
  std::vector<std::byte> bytes(size);
  for (std::uint64_t i = 0; i + 8 <= size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  for (std::uint64_t i = size / 8 * 8; i < size; ++i) bytes[i] = static_cast<std::byte>(random());
  return bytes;
}

class ReferenceModelConformanceTest : public DeviceConformanceTest {
 protected:
  static constexpr std::uint64_t kMemory = 48 * kMiB;

  void SetUp() override {
    DeviceConformanceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    memory_ = allocate(kMemory);
    staging_ = pinned(kMemory);
    ASSERT_NE(memory_, nullptr);
  }

  /// The next free place, at an odd number of bytes from an aligned one.
  DevicePtr place(std::uint64_t size, std::uint64_t odd = 0) {
    const DevicePtr out = memory_->address() + (used_ + odd);
    used_ += (size + odd + 255) / 256 * 256;
    EXPECT_LE(used_, kMemory);
    return out;
  }

  template <typename T> DevicePtr put(const std::vector<T>& items, std::uint64_t odd = 0) {
    const std::uint64_t size = items.size() * sizeof(T);
    const DevicePtr out = place(size, odd);
    write(out, items);
    return out;
  }

  template <typename T> void write(DevicePtr target, const std::vector<T>& items) {
    const std::uint64_t size = items.size() * sizeof(T);
    if (size == 0) return;
    std::memcpy(staging_->data(), items.data(), size);
    copy(CopyDirection::kHostToDevice, staging_->data(), target, size);
  }

  template <typename T> std::vector<T> get(DevicePtr source, std::size_t count) {
    std::vector<T> items(count);
    if (count == 0) return items;
    copy(CopyDirection::kDeviceToHost, staging_->data(), source, count * sizeof(T));
    std::memcpy(items.data(), staging_->data(), count * sizeof(T));
    return items;
  }

  /// The layout's regions with its arena at another address.
  std::unique_ptr<RegionTable> table_at(const RandomLayout& layout, DevicePtr arena) {
    auto regions = layout.regions;
    for (auto& region : regions) {
      region.base =
          at<unsigned char>(arena + static_cast<std::uint64_t>(region.base - layout.arena.data()));
    }
    auto table = device_->make_region_table(std::move(regions));
    EXPECT_TRUE(table.has_value());
    return std::move(table).value();
  }

  DecodePass put(RandomPass& random_pass) {
    DecodePass pass = random_pass.pass();
    pass.counts = at<std::uint32_t>(
        put(std::vector<std::uint32_t>(random_pass.counts.begin(), random_pass.counts.end())));
    pass.writes = at<kernels::TokenWrite>(put(random_pass.writes));
    pass.reads = at<kernels::TokenRead>(put(random_pass.reads));
    pass.model = at<std::uint64_t>(put(random_pass.model));
    pass.outputs = at<std::uint64_t>(put(random_pass.outputs));
    return pass;
  }

  static DevicePtr address_of(const void* item) {
    return DevicePtr{reinterpret_cast<std::uintptr_t>(item)};
  }

  std::unique_ptr<RecordedWork> record(const std::function<Status(Stream&)>& body) {
    auto work = stream_->record(body);
    if (!work) {
      ADD_FAILURE() << work.error().to_string();
      return nullptr;
    }
    return std::move(work).value();
  }

  std::unique_ptr<DeviceMemory> memory_;
  std::unique_ptr<PinnedBuffer> staging_;
  std::uint64_t used_ = 0;
};

TEST_P(ReferenceModelConformanceTest, DecodeMatchesTheTwinOverRandomLayouts) {
  const std::array<LayoutShape, 4> shapes = {
      LayoutShape{},                   // odd everything
      LayoutShape{3, 60'000, 6, 1},    // more than one piece of work per slice
      LayoutShape{3, 200'000, 6, 16},  // the same, aligned
      LayoutShape{500, 60, 3, 1},      // more regions than one launch takes
  };
  for (std::uint32_t seed = 0; seed < 80; ++seed) {
    RandomLayout layout(seed, shapes[seed % shapes.size()]);
    RandomPass random_pass(layout);
    used_ = 0;
    const DevicePtr arena = put(layout.arena);
    const auto table = table_at(layout, arena);
    const DecodePass pass = put(random_pass);
    const auto launched = stream_->decode(*table, pass);
    ASSERT_TRUE(launched.has_value()) << launched.error().to_string();
    kernels::host::decode(layout.regions.data(), layout.region_count(), random_pass.pass());
    ASSERT_EQ(get<unsigned char>(arena, layout.arena.size()), layout.arena) << seed;
    ASSERT_EQ(get<std::uint64_t>(address_of(pass.outputs), random_pass.outputs.size()),
              random_pass.outputs)
        << seed;
  }
}

// As an engine runs it: many blocks of many sequences, so that all of the device works.
TEST_P(ReferenceModelConformanceTest, DecodeMatchesTheTwinForAFullBatch) {
  constexpr std::uint64_t kSlice = 16 << 10;
  constexpr std::uint32_t kBlocks = 128;
  constexpr std::uint32_t kRegions = 8;
  constexpr std::uint32_t kTokens = 16;
  std::mt19937_64 random(4);
  std::vector<std::byte> arena = random_bytes(random, kSlice * kBlocks * kRegions);
  const DevicePtr device_arena = put(arena);
  std::vector<kernels::StridedRegion> regions;
  std::vector<kernels::StridedRegion> device_regions;
  for (std::uint32_t r = 0; r < kRegions; ++r) {
    const std::uint64_t offset = r * kSlice * kBlocks;
    regions.push_back(
        {reinterpret_cast<unsigned char*>(arena.data()) + offset, kSlice, kSlice, 0, r});
    device_regions.push_back(regions.back());
    device_regions.back().base = at<unsigned char>(device_arena + offset);
  }
  std::vector<kernels::TokenWrite> writes;
  std::vector<kernels::TokenRead> reads;
  for (std::uint32_t s = 0; s < 32; ++s) {
    for (std::uint32_t p = 0; p < 40; ++p) {
      reads.push_back({s, (s * 4 + p) % kBlocks, p, 0, p == 39 ? 5 : kTokens, 0});
    }
    writes.push_back({random(), s * 4, s % kTokens, 1, 0});
  }
  writes.push_back({random(), 1, 0, kTokens, 0});
  const std::vector<std::uint32_t> counts = {static_cast<std::uint32_t>(writes.size()),
                                             static_cast<std::uint32_t>(reads.size())};
  std::vector<std::uint64_t> model(2 * kModelWords);
  for (std::uint64_t& word : model) word = random();
  std::vector<std::uint64_t> outputs(32);
  DecodePass pass{
      counts.data(),  writes.data(), reads.data(), model.data(),
      outputs.data(), 4096,          4096,         static_cast<std::uint32_t>(outputs.size()),
      kTokens};
  DecodePass device_pass = pass;
  device_pass.counts = at<std::uint32_t>(put(counts));
  device_pass.writes = at<kernels::TokenWrite>(put(writes));
  device_pass.reads = at<kernels::TokenRead>(put(reads));
  device_pass.model = at<std::uint64_t>(put(model));
  device_pass.outputs = at<std::uint64_t>(put(outputs));
  auto table = device_->make_region_table(device_regions);
  ASSERT_TRUE(table.has_value());
  ASSERT_TRUE(stream_->decode(**table, device_pass).has_value());
  kernels::host::decode(regions.data(), kRegions, pass);
  EXPECT_EQ(get<std::uint64_t>(address_of(device_pass.outputs), outputs.size()), outputs);
  EXPECT_EQ(get<std::byte>(device_arena, arena.size()), arena);
}

TEST_P(ReferenceModelConformanceTest, FoldAndExpandMatchTheTwins) {
  std::mt19937_64 random(6);
  // The last one takes every thread of a large launch round several times.
  for (const std::uint64_t size :
       std::vector<std::uint64_t>{0, 1, 7, 8, 4099, 8192, 100'000, 20 * kMiB + 5}) {
    for (const std::uint64_t odd : std::vector<std::uint64_t>{0, 1, 8}) {
      used_ = 0;
      const std::vector<std::byte> bytes = random_bytes(random, size);
      const DevicePtr source = put(bytes, odd);
      std::vector<std::uint64_t> sums(kModelWords, random());
      const DevicePtr device_sums = put(sums);
      ASSERT_TRUE(stream_->fold(source, size, 99, device_sums).has_value());
      const auto* raw = reinterpret_cast<const unsigned char*>(bytes.data());
      kernels::host::fold(raw, size, 99, sums.data());
      ASSERT_EQ(get<std::uint64_t>(device_sums, kModelWords), sums) << size << " at " << odd;

      const std::uint64_t source_bytes = std::min<std::uint64_t>(size, 9001);
      if (source_bytes == 0) continue;
      std::vector<std::byte> target(size + 16, std::byte{0xEE});
      const DevicePtr device_target = put(target);
      ASSERT_TRUE(
          stream_->expand(source, source_bytes, device_target + (8 - odd), size).has_value());
      kernels::host::expand(raw, source_bytes,
                            reinterpret_cast<unsigned char*>(target.data()) + (8 - odd), size);
      ASSERT_EQ(get<std::byte>(device_target, target.size()), target) << size << " at " << odd;
    }
  }
}

/// Inputs of a pass in pinned memory, as an engine rewrites them for each step.
struct PinnedInputs {
  static constexpr std::uint32_t kCapacity = 1024;
  std::array<std::uint32_t, 2> counts;
  std::array<kernels::TokenWrite, kCapacity> writes;
  std::array<kernels::TokenRead, kCapacity> reads;
  std::array<std::uint64_t, 2ULL * kModelWords> model;

  void set(const RandomPass& random_pass) {
    counts = {random_pass.write_count(), random_pass.read_count()};
    ASSERT_LE(std::max(counts[0], counts[1]), kCapacity);
    std::copy_n(random_pass.writes.begin(), counts[0], writes.begin());
    std::copy_n(random_pass.reads.begin(), counts[1], reads.begin());
    std::copy(random_pass.model.begin(), random_pass.model.end(), model.begin());
  }

  static DecodePass pass_at(DevicePtr inputs, DevicePtr outputs) {
    const auto* placed = at<const PinnedInputs>(inputs);
    return {placed->counts.data(),
            placed->writes.data(),
            placed->reads.data(),
            placed->model.data(),
            at<std::uint64_t>(outputs),
            kCapacity,
            kCapacity,
            kSequences,
            kTokens};
  }

  static constexpr std::uint32_t kSequences = 16;
  static constexpr std::uint32_t kTokens = 16;
};

/// The step that is recorded: inputs in, a pass, answers and the KV cache out.
class RecordedStep {
 public:
  RecordedStep(Device& device, RandomLayout& layout)
      : layout_(layout),
        inputs_(device.make_pinned_buffer(sizeof(PinnedInputs)).value()),
        outputs_(device.make_pinned_buffer(kOutputBytes).value()),
        arena_(device.make_pinned_buffer(layout.arena.size()).value()) {}

  [[nodiscard]] Status body(Stream& stream,
                            const RegionTable& table,
                            DevicePtr arena,
                            DevicePtr inputs,
                            DevicePtr outputs) const {
    const std::array<CopyOp, 2> in = {CopyOp{inputs_->data(), inputs, sizeof(PinnedInputs)},
                                      CopyOp{arena_->data(), arena, layout_.arena.size()}};
    const std::array<CopyOp, 3> out = {CopyOp{outputs_->data(), outputs, kOutputBytes},
                                       CopyOp{arena_->data(), arena, layout_.arena.size()},
                                       CopyOp{outputs_->data(), outputs, 0}};
    KVFERRY_TRY(stream.zero(arena, layout_.arena.size()));
    KVFERRY_TRY(stream.copy(CopyDirection::kHostToDevice, in, CopyMode::kBatch));
    KVFERRY_TRY(stream.zero(outputs, kOutputBytes));
    KVFERRY_TRY(stream.zero(outputs, 0));
    KVFERRY_TRY(stream.decode(table, PinnedInputs::pass_at(inputs, outputs)));
    return stream.copy(CopyDirection::kDeviceToHost, out, CopyMode::kEach);
  }

  /// Other inputs and KV than before; the twin's answers to them.
  void change() {
    for (unsigned char& byte : layout_.arena) byte = static_cast<unsigned char>(layout_.random());
    RandomPass random_pass(layout_, PinnedInputs::kTokens);
    reinterpret_cast<PinnedInputs*>(inputs_->data())->set(random_pass);
    std::memcpy(arena_->data(), layout_.arena.data(), layout_.arena.size());
    std::memset(outputs_->data(), 0xEE, kOutputBytes);
    // Of the record's capacity, and zeroed by it.
    random_pass.outputs.assign(PinnedInputs::kSequences, 0);
    kernels::host::decode(layout_.regions.data(), layout_.region_count(), random_pass.pass());
    expected_ = random_pass.outputs;
  }

  void expect_the_twins_results() const {
    EXPECT_EQ(std::memcmp(outputs_->data(), expected_.data(), kOutputBytes), 0);
    EXPECT_EQ(std::memcmp(arena_->data(), layout_.arena.data(), layout_.arena.size()), 0);
  }

  static constexpr std::uint64_t kOutputBytes = PinnedInputs::kSequences * sizeof(std::uint64_t);

 private:
  RandomLayout& layout_;
  std::unique_ptr<PinnedBuffer> inputs_;
  std::unique_ptr<PinnedBuffer> outputs_;
  std::unique_ptr<PinnedBuffer> arena_;
  std::vector<std::uint64_t> expected_;
};

TEST_P(ReferenceModelConformanceTest, RecordedWorkUsesWhatItsInputsHoldWhenItRuns) {
  RandomLayout layout(3, {4, 9000, 8, 1});
  RecordedStep step(*device_, layout);
  const DevicePtr arena = place(layout.arena.size());
  const DevicePtr inputs = place(sizeof(PinnedInputs));
  const std::vector<std::uint64_t> marks(PinnedInputs::kSequences, 7);
  const DevicePtr outputs = put(marks);
  const auto table = table_at(layout, arena);
  const auto work =
      record([&](Stream& stream) { return step.body(stream, *table, arena, inputs, outputs); });
  ASSERT_NE(work, nullptr);
  EXPECT_TRUE(stream_->query().value_or(false));
  EXPECT_EQ(get<std::uint64_t>(outputs, marks.size()), marks) << "recording ran something";
  auto other = device_->make_stream(StreamPriority::kHigh);
  ASSERT_TRUE(other.has_value());
  for (int round = 0; round < 12; ++round) {
    // The last rounds on another stream than the one that recorded.
    if (round == 8) std::swap(stream_, *other);
    step.change();
    ASSERT_TRUE(stream_->launch(*work).has_value());
    finish();
    step.expect_the_twins_results();
  }
}

TEST_P(ReferenceModelConformanceTest, RecordedWorkRunsAgainWhileItIsUnderWay) {
  RandomLayout layout(8);
  RandomPass random_pass(layout);
  const auto table = table_at(layout, put(layout.arena));
  const DecodePass pass = put(random_pass);
  const auto work = record([&](Stream& stream) { return stream.decode(*table, pass); });
  ASSERT_NE(work, nullptr);
  constexpr int kLaunches = 50;
  for (int i = 0; i < kLaunches; ++i) {
    ASSERT_TRUE(stream_->launch(*work).has_value());
    ASSERT_TRUE(stream_->decode(*table, pass).has_value());  // in order with all else
  }
  for (int i = 0; i < 2 * kLaunches; ++i) {
    kernels::host::decode(layout.regions.data(), layout.region_count(), random_pass.pass());
  }
  EXPECT_EQ(get<std::uint64_t>(address_of(pass.outputs), random_pass.outputs.size()),
            random_pass.outputs);
}

TEST_P(ReferenceModelConformanceTest, RecordedWorkRunsOnMemoryThatCameBackAtItsAddress) {
  if (GetParam() != HandleKind::kVmm) GTEST_SKIP() << "VMM only";
  RandomLayout layout(5, {4, 9000, 8, 8});
  RecordedStep step(*device_, layout);
  auto range = device_->reserve(8 * kMiB);
  ASSERT_TRUE(range.has_value());
  // The weights' tables, the inputs and the outputs stay; the KV cache goes and comes.
  const DevicePtr arena = (*range)->address();
  const DevicePtr inputs = place(sizeof(PinnedInputs));
  const DevicePtr outputs = place(RecordedStep::kOutputBytes);
  const auto table = table_at(layout, arena);
  auto cache = allocate(8 * kMiB, range->get());
  ASSERT_NE(cache, nullptr);
  const auto work =
      record([&](Stream& stream) { return step.body(stream, *table, arena, inputs, outputs); });
  ASSERT_NE(work, nullptr);
  for (int epoch = 0; epoch < 6; ++epoch) {
    for (int round = 0; round < 2; ++round) {
      step.change();
      ASSERT_TRUE(stream_->launch(*work).has_value());
      finish();
      step.expect_the_twins_results();
    }
    ASSERT_TRUE(cache->release().has_value());
    cache = allocate(8 * kMiB, range->get());
    ASSERT_NE(cache, nullptr);
    ASSERT_EQ(cache->address(), arena);
  }
}

TEST_P(ReferenceModelConformanceTest, AllWorkCanBeRecorded) {
  std::mt19937_64 random(9);
  constexpr std::uint32_t kBlocks = 300;  // more than one launch takes
  constexpr std::uint64_t kSlice = 1000;
  const DevicePtr arena = place(kSlice * kBlocks);
  const DevicePtr packed = place(kSlice * kBlocks);
  const DevicePtr sums = place(kModelWords * 8);
  const DevicePtr expanded = place(kMiB);
  auto table = device_->make_region_table({{at<unsigned char>(arena), kSlice, kSlice, 0, 5}});
  ASSERT_TRUE(table.has_value());
  std::vector<kernels::SeededBlock> blocks;
  std::vector<std::uint32_t> ids;
  for (std::uint32_t i = 0; i < kBlocks; ++i) {
    blocks.push_back({random(), i, 0});
    ids.push_back(i);
  }
  auto wrong = pinned(kBlocks * 8);
  auto checksums = pinned(kBlocks * 8);
  const auto body = [&](Stream& stream) -> Status {
    KVFERRY_TRY(stream.zero(sums, kModelWords * 8));
    KVFERRY_TRY(stream.fill_pattern(**table, blocks));
    KVFERRY_TRY(stream.gather(**table, ids, packed, kSlice));
    KVFERRY_TRY(stream.zero(arena, kSlice * kBlocks));
    KVFERRY_TRY(stream.scatter(**table, ids, packed, kSlice));
    KVFERRY_TRY(stream.verify_pattern(**table, blocks, *wrong));
    KVFERRY_TRY(stream.checksum(**table, ids, *checksums));
    KVFERRY_TRY(stream.fold(arena, kSlice * kBlocks, 1, sums));
    return stream.expand(sums, kModelWords * 8, expanded, kMiB);
  };
  ASSERT_TRUE(body(*stream_).has_value());
  const auto expected = get<std::byte>(expanded, kMiB);
  std::vector<std::byte> seen(checksums->data(), checksums->data() + kBlocks * 8);
  const auto work = record(body);
  ASSERT_NE(work, nullptr);
  write(expanded, std::vector<std::byte>(kMiB));
  std::memset(checksums->data(), 0, kBlocks * 8);
  ASSERT_TRUE(stream_->launch(*work).has_value());
  EXPECT_EQ(get<std::byte>(expanded, kMiB), expected);
  EXPECT_EQ(std::memcmp(checksums->data(), seen.data(), seen.size()), 0);
  const auto* words = reinterpret_cast<const std::uint64_t*>(wrong->data());
  EXPECT_EQ(std::count(words, words + kBlocks, 0U), kBlocks);
}

TEST_P(ReferenceModelConformanceTest, NothingRunsOfARecordingThatFails) {
  const std::vector<std::uint64_t> marks(4, 7);
  const DevicePtr target = put(marks);
  const EventFd event;
  const auto empty = record([](Stream&) { return ok(); });
  ASSERT_NE(empty, nullptr);
  const std::vector<std::function<Status(Stream&)>> bodies = {
      [&](Stream& stream) { return stream.notify(event.fd()); },
      [](Stream& stream) -> Status {
        KVFERRY_TRY(stream.query());
        return ok();
      },
      [](Stream& stream) -> Status {
        KVFERRY_TRY(stream.record([](Stream&) { return ok(); }));
        return ok();
      },
      [&](Stream& stream) { return stream.launch(*empty); },
      [](Stream& stream) { return stream.fold(DevicePtr{}, 8, 1, DevicePtr{}); },
      [](Stream&) -> Status { return KVFERRY_ERROR(kInvalidArgument, "as the body likes"); }};
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    const auto work = stream_->record([&](Stream& stream) -> Status {
      KVFERRY_TRY(stream.zero(target, marks.size() * 8));
      return bodies[i](stream);
    });
    ASSERT_FALSE(work.has_value()) << i;
    EXPECT_EQ(work.error().code, ErrorCode::kInvalidArgument) << work.error().to_string();
    EXPECT_TRUE(stream_->query().value_or(false));
    EXPECT_EQ(get<std::uint64_t>(target, marks.size()), marks) << i;
  }
  ASSERT_TRUE(stream_->launch(*empty).has_value());
  finish();
  // A refusal that the body gets over does not spoil the rest.
  const auto work = record([&](Stream& stream) -> Status {
    EXPECT_FALSE(stream.notify(event.fd()).has_value());
    EXPECT_FALSE(stream.query().has_value());
    return stream.zero(target, marks.size() * 8);
  });
  ASSERT_NE(work, nullptr);
  ASSERT_TRUE(stream_->launch(*work).has_value());
  EXPECT_EQ(get<std::uint64_t>(target, marks.size()), std::vector<std::uint64_t>(marks.size()));
}

TEST_P(ReferenceModelConformanceTest, RefusesWhatCannotBeRight) {
  RandomLayout layout(1);
  RandomPass random_pass(layout);
  const auto table = table_at(layout, put(layout.arena));
  const DecodePass good = put(random_pass);
  std::vector<DecodePass> bad(8, good);
  bad[0].counts = nullptr;
  bad[1].model = nullptr;
  bad[2].outputs = nullptr;
  bad[3].tokens_per_block = 0;
  bad[4].tokens_per_block = kernels::kMaxTokensPerBlock + 1;
  bad[5].max_reads = 1;
  bad[5].reads = nullptr;
  bad[6].max_writes = 1;
  bad[6].writes = at<kernels::TokenWrite>(address_of(good.writes) + 4);
  bad[7].outputs = at<std::uint64_t>(address_of(good.outputs) + 1);
  for (std::size_t i = 0; i < bad.size(); ++i) {
    const auto refused = stream_->decode(*table, bad[i]);
    ASSERT_FALSE(refused.has_value()) << i;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  }
  const DevicePtr bytes = place(kMiB);
  for (const Status& refused :
       {stream_->fold(DevicePtr{}, 8, 1, bytes), stream_->fold(bytes, 8, 1, DevicePtr{}),
        stream_->fold(bytes, ~0ULL, 1, bytes + 8192), stream_->fold(bytes, 8, 1, bytes + 9),
        stream_->fold(bytes, 9, 1, bytes + 8), stream_->expand(DevicePtr{}, 8, bytes, 8),
        stream_->expand(bytes, 0, bytes + 8, 8), stream_->expand(bytes, 8, DevicePtr{}, 8),
        stream_->expand(bytes, 8, bytes + 8, ~0ULL), stream_->expand(bytes, 8, bytes + 7, 8)}) {
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  }
  struct Foreign final : RecordedWork {};
  const auto refused = stream_->launch(Foreign{});
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  // And the device still works.
  ASSERT_TRUE(stream_->decode(*table, good).has_value());
  finish();
}

INSTANTIATE_TEST_SUITE_P(Handles,
                         ReferenceModelConformanceTest,
                         testing::Values(HandleKind::kVmm, HandleKind::kLegacy),
                         [](const auto& param) { return std::string(to_string(param.param)); });

}  // namespace
}  // namespace kvferry::ipc
