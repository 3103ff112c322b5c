// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/pool_catalogue.hpp"

#include "manager/prefix_index.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using catalogue::BlockState;
using ipc::Digest;
using ipc::ErrorCode;

constexpr std::uint64_t kPool = 64ULL * 4096;
constexpr std::uint32_t kRanks = 2;

Digest digest(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape_of(std::uint32_t group = 0) {
  SlabShape shape;
  shape.fingerprint = digest(99);
  shape.group = ipc::GroupId{group};
  shape.bytes.replicated_bytes = 512;
  shape.bytes.shard_bytes = 1024;
  shape.ranks = kRanks;
  return shape;
}

/// What a catalogue says, as the next manager reads it.
struct Reading {
  std::map<ipc::BlockKey, Digest> visible;  ///< With what each continues.
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::uint64_t> sequences;
  std::set<std::uint64_t> taken;  ///< Places of all slots that hold something.
  std::size_t slabs = 0;
};

class PoolCatalogueTest : public testing::Test {
 protected:
  void SetUp() override {
    auto made = PoolCatalogue::create(pool_.stats(), digest(7));
    ASSERT_TRUE(made.has_value()) << made.error().to_string();
    catalogue_ = std::move(made).value();
    pool_.observe(catalogue_.get());
    pool_fd_ = ipc::SharedMemory::create_pool("kvferry-test-pool", kPool, false).value();
    catalogue_->note_root({root_, digest(99), "chat", "default"});
  }
  void TearDown() override { pool_.observe(nullptr); }

  [[nodiscard]] ipc::PoolMemory memory() const {
    ipc::PoolMemory memory;
    memory.id = digest(7);
    memory.pool_bytes = kPool;
    memory.catalogue_bytes = catalogue_->size_bytes();
    memory.pool = duplicate(pool_fd_);
    memory.catalogue = duplicate(catalogue_->fd());
    return memory;
  }
  static ipc::UniqueFd duplicate(const ipc::UniqueFd& fd) {
    return ipc::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  }
  static ipc::Result<std::unique_ptr<PoolCatalogue>> open(const ipc::PoolMemory& memory) {
    return PoolCatalogue::open(memory, HostPool(kPool).stats());
  }
  /// By a manager that comes now, whatever this one is doing.
  [[nodiscard]] Reading read() const {
    Reading reading;
    auto opened = open(memory());
    EXPECT_TRUE(opened.has_value()) << opened.error().to_string();
    if (!opened) return reading;
    const PoolCatalogue& found = **opened;
    HostPool successor(kPool);
    successor.observe(opened->get());
    for (const SlabPlace& place : found.slabs()) {
      const auto slab = successor.adopt(place);
      EXPECT_TRUE(slab.has_value()) << slab.error().to_string();
      if (!slab) continue;
      ++reading.slabs;
      for (std::uint32_t i = 0; i < place.capacity; ++i) {
        const BlockState state = found.state(*slab, i);
        if (state == BlockState::kNone) continue;
        const HostSlot slot = successor.adopt_slot(*slab, i);
        reading.taken.insert(successor.offsets(slot, ipc::Rank{0}).shard);
        if (state == BlockState::kVisible) {
          const auto block = found.find(slot);
          if (!block) continue;
          EXPECT_TRUE(reading.visible
                          .emplace(ipc::BlockKey{block->root, block->block, place.shape.group},
                                   block->before)
                          .second);
        } else if (const auto sequence = found.find_sequence(slot)) {
          EXPECT_EQ(sequence->engine, "chat");
          reading.sequences[{sequence->handle, sequence->index}] =
              successor.offsets(slot, ipc::Rank{0}).shard;
        }
      }
    }
    successor.observe(nullptr);
    return reading;
  }

  PrefixIndex::Token reserve(std::uint64_t block, std::uint32_t group = 0, Digest before = {}) {
    Extent extent;
    return index_
        .reserve(client_, {root_, digest(block), ipc::GroupId{group}}, before, shape_of(group),
                 extent)
        .slot;
  }
  void store(std::uint64_t block, std::uint32_t group = 0, Digest before = {}) {
    const PrefixIndex::Token token = reserve(block, group, before);
    ASSERT_NE(index_.begin_fill(client_, token), nullptr);
    EXPECT_TRUE(index_.commit(token));
  }
  [[nodiscard]] std::byte* bytes() const {
    // A mapping of its own: whoever has the descriptor can write there.
    static thread_local ipc::SharedMapping mapping;
    mapping = ipc::SharedMemory::map_pool(catalogue_->fd(), catalogue_->size_bytes()).value();
    return mapping.data();
  }

  /// Of the only slab's first block.
  [[nodiscard]] catalogue::Block* first_record() const {
    const catalogue::Layout layout(pool_.stats().pages, pool_.stats().page_bytes);
    return reinterpret_cast<catalogue::Block*>(bytes() + layout.areas);
  }
  /// What the next manager takes slots for, of those that it does not take for free ones.
  [[nodiscard]] std::vector<BlockState> adopted() {
    std::vector<BlockState> states;
    auto opened = open(memory()).value();
    HostPool successor(kPool);
    successor.observe(opened.get());
    for (const SlabPlace& place : opened->slabs()) {
      const std::uint32_t slab = successor.adopt(place).value();
      for (std::uint32_t i = 0; i < place.capacity; ++i) {
        const BlockState state = opened->adopt(slab, i).state;
        if (state != BlockState::kNone) states.push_back(state);
      }
    }
    successor.observe(nullptr);
    damaged_ = opened->damaged();
    return states;
  }

  std::uint64_t damaged_ = 0;  ///< As adopted() found them.
  const Digest root_ = digest(1000);
  const ipc::IncarnationId client_ = digest(2000);
  ipc::UniqueFd pool_fd_;
  HostPool pool_{kPool};
  std::unique_ptr<PoolCatalogue> catalogue_;
  PrefixIndex index_{pool_, "lru"};
};

TEST_F(PoolCatalogueTest, VisibleBlocksAreFoundAndThoseUnderWayAreOnlyTaken) {
  store(1);
  store(2, 1, digest(1));
  const PrefixIndex::Token reserved = reserve(3);
  (void)index_.begin_fill(client_, reserve(4));
  const Reading reading = read();
  EXPECT_EQ(reading.visible,
            (std::map<ipc::BlockKey, Digest>{{{root_, digest(1), ipc::GroupId{0}}, {}},
                                             {{root_, digest(2), ipc::GroupId{1}}, digest(1)}}));
  EXPECT_EQ(reading.taken.size(), 4U);
  index_.discard(reserved);
  EXPECT_EQ(read().taken.size(), 3U);
}

TEST_F(PoolCatalogueTest, ABlockThatIsDroppedWhileItIsReadIsTakenAndNotFound) {
  store(1);
  HostBlockRef reader = index_.acquire({root_, digest(1), ipc::GroupId{0}});
  ASSERT_NE(reader, nullptr);
  EXPECT_EQ(index_.drop_root(root_, [](const ipc::IncarnationId&) { return false; }), 1U);
  EXPECT_TRUE(read().visible.empty());
  EXPECT_EQ(read().taken.size(), 1U);
  reader.reset();
  EXPECT_TRUE(read().taken.empty());
  EXPECT_EQ(read().slabs, 0U);
}

TEST_F(PoolCatalogueTest, SequencesAreFoundByOwnerHandleAndIndex) {
  Extent extent;
  HostBlockRef block = index_.allocate(shape_of(), extent);
  catalogue_->on_sequence(block->slot(), root_, client_, 42, 3);
  EXPECT_EQ(read().sequences.size(), 1U);
  EXPECT_EQ(read().sequences.count({42, 3}), 1U);
  block.reset();
  EXPECT_TRUE(read().sequences.empty());
}

TEST_F(PoolCatalogueTest, ChecksumsAreFoundOnceTheyAreKnown) {
  store(1);
  const ipc::BlockKey key{root_, digest(1), ipc::GroupId{0}};
  const HostSlot slot = index_.acquire(key)->slot();
  EXPECT_EQ(catalogue_->find(slot)->summed_parts, 0U);
  const std::array<std::uint64_t, kRanks + 1> sums{5, 6, 7};
  catalogue_->on_visible(slot, key, {}, sums);
  EXPECT_EQ(catalogue_->find(slot)->summed_parts, 1U);
  EXPECT_THAT(catalogue_->sums(slot), testing::ElementsAre(5, 6, 7));
  EXPECT_EQ(read().visible.size(), 1U);
}

TEST_F(PoolCatalogueTest, UntilThenItIsKnownWhoseTheyWouldBe) {
  store(1);
  const ipc::BlockKey key{root_, digest(1), ipc::GroupId{0}};
  const HostSlot slot = index_.acquire(key)->slot();
  EXPECT_FALSE(catalogue_->find(slot)->awaited.has_value());
  catalogue_->on_awaited(slot, ipc::JobId{77}, 1);
  EXPECT_EQ(catalogue_->find(slot)->awaited, ipc::JobId{77});
  EXPECT_EQ(catalogue_->find(slot)->parts, 1U);
  EXPECT_EQ(catalogue_->find(slot)->summed_parts, 0U);
  EXPECT_TRUE(catalogue_->sums(slot).empty());
  const std::array<std::uint64_t, kRanks + 1> sums{5, 6, 7};
  catalogue_->on_summed(slot, sums);
  catalogue_->on_awaited(slot, ipc::JobId{78}, 1);
  EXPECT_FALSE(catalogue_->find(slot)->awaited.has_value());
  EXPECT_EQ(catalogue_->find(slot)->summed_parts, 1U);
  EXPECT_THAT(catalogue_->sums(slot), testing::ElementsAre(5, 6, 7));
}

TEST_F(PoolCatalogueTest, BlocksWithoutChecksumsAreCounted) {
  store(1);
  store(2);
  EXPECT_EQ(catalogue_->unsummed(), 2U);
  const HostSlot slot = index_.acquire({root_, digest(1), ipc::GroupId{0}})->slot();
  const std::array<std::uint64_t, kRanks + 1> sums{5, 6, 7};
  catalogue_->on_summed(slot, sums);
  catalogue_->on_summed(slot, sums);
  EXPECT_EQ(catalogue_->unsummed(), 1U);
  const HostBlockRef other = index_.acquire({root_, digest(2), ipc::GroupId{0}});
  catalogue_->on_awaited(other->slot(), ipc::JobId{77}, 1);
  EXPECT_EQ(catalogue_->unsummed(), 1U);
  index_.drop_block(*other);
  EXPECT_EQ(catalogue_->unsummed(), 0U);
  index_.drop_block(*index_.acquire({root_, digest(1), ipc::GroupId{0}}));
  EXPECT_EQ(catalogue_->unsummed(), 0U);
}

TEST_F(PoolCatalogueTest, AUseIsSeenWithoutTouchingTheBlock) {
  store(1);
  const ipc::BlockKey key{root_, digest(1), ipc::GroupId{0}};
  const HostSlot slot = index_.acquire(key)->slot();
  const std::uint32_t before = catalogue_->find(slot)->used;
  index_.use(root_, std::array{digest(1)}, 1);
  EXPECT_GT(catalogue_->find(slot)->used, before);
  EXPECT_EQ(read().visible.size(), 1U);
}

TEST_F(PoolCatalogueTest, WhoMayCopyIsKnownUntilItIsForgotten) {
  const auto self = ipc::ProcessRef::of_pid(::getpid());
  ASSERT_TRUE(self.has_value());
  catalogue_->note_user(*self, digest(1), catalogue::UserKind::kMover);
  catalogue_->note_user(*self, digest(1), catalogue::UserKind::kMover);  // again
  catalogue_->note_user(*self, digest(2), catalogue::UserKind::kEngine);
  auto users = open(memory()).value()->users();
  ASSERT_EQ(users.size(), 2U);
  EXPECT_EQ(users[0].pid, ::getpid());
  EXPECT_EQ(users[0].start_time, self->start_time());
  EXPECT_EQ(users[0].kind, catalogue::UserKind::kMover);
  catalogue_->forget_user(digest(1));
  users = open(memory()).value()->users();
  ASSERT_EQ(users.size(), 1U);
  EXPECT_EQ(users[0].incarnation, digest(2));
}

TEST_F(PoolCatalogueTest, APlaceOfARootWithoutBlocksIsAnotherOnes) {
  store(1);
  for (std::uint64_t i = 0; i < 2ULL * catalogue::kRoots; ++i) {
    catalogue_->note_root({digest(10'000 + i), digest(99), "other", "default"});
  }
  const Reading reading = read();
  EXPECT_EQ(reading.visible.size(), 1U) << "the root that has a block stays";
  EXPECT_EQ(open(memory()).value()->roots().size(), catalogue::kRoots);
}

TEST_F(PoolCatalogueTest, BlocksThatAreTooSmallMakeThePoolOneThatDoesNotOutliveItsManager) {
  store(1);
  SlabShape shape = shape_of();
  shape.bytes = {0, 64};
  Extent extent;
  const HostBlockRef tiny = index_.allocate(shape, extent);
  ASSERT_NE(tiny, nullptr);
  EXPECT_EQ(open(memory()).error().code, ErrorCode::kProtocol);
}

TEST_F(PoolCatalogueTest, AnotherSizeIsRefused) {
  const auto refused = PoolCatalogue::open(memory(), HostPool(2 * kPool).stats());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
}

TEST_F(PoolCatalogueTest, AnotherFormatIsRefusedWithBothVersions) {
  auto* header = reinterpret_cast<catalogue::Header*>(bytes());
  header->version = 77;
  const auto refused = open(memory());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kVersionMismatch);
  EXPECT_NE(refused.error().message.find("77"), std::string::npos) << refused.error().message;
}

TEST_F(PoolCatalogueTest, WhatIsNoCatalogueIsRefused) {
  ipc::PoolMemory wrong = memory();
  wrong.catalogue = duplicate(pool_fd_);
  wrong.catalogue_bytes = kPool;
  EXPECT_EQ(open(wrong).error().code, ErrorCode::kProtocol);
  wrong = memory();
  wrong.catalogue_bytes = 100;
  EXPECT_EQ(open(wrong).error().code, ErrorCode::kProtocol);
  wrong = memory();
  wrong.pool = ipc::UniqueFd();
  EXPECT_FALSE(open(wrong).has_value());
  wrong = memory();
  wrong.id = digest(8);
  EXPECT_EQ(open(wrong).error().code, ErrorCode::kProtocol);
}

TEST_F(PoolCatalogueTest, ARootWithBlocksOfAnEarlierManagerKeepsItsPlace) {
  for (std::uint64_t i = 1; i <= 4; ++i) store(i);
  auto opened = open(memory()).value();
  HostPool successor(kPool);
  successor.observe(opened.get());
  std::vector<HostSlot> slots;
  for (const SlabPlace& place : opened->slabs()) {
    const auto slab = successor.adopt(place);
    ASSERT_TRUE(slab.has_value());
    for (std::uint32_t i = 0; i < place.capacity; ++i) {
      if (opened->adopt(*slab, i).state == BlockState::kVisible) {
        slots.push_back(successor.adopt_slot(*slab, i));
      }
    }
  }
  ASSERT_EQ(slots.size(), 4U);
  // As many are dropped as are kept.
  successor.free(slots[0]);
  successor.free(slots[1]);
  for (std::uint64_t i = 0; i < 2ULL * catalogue::kRoots; ++i) {
    opened->note_root({digest(10'000 + i), digest(99), "other", "default"});
  }
  EXPECT_EQ(opened->find(slots[2])->root, root_);
  EXPECT_EQ(opened->find(slots[3])->root, root_);
  successor.observe(nullptr);
}

TEST_F(PoolCatalogueTest, BlocksWhoseRootIsNotWholeAreEmptyBeforeItsPlaceIsAnotherOnes) {
  store(1);
  const catalogue::Layout layout(pool_.stats().pages, pool_.stats().page_bytes);
  auto* root = reinterpret_cast<catalogue::Root*>(bytes() + layout.roots);
  ASSERT_NE(root->check, 0U);
  root->check = 0;  // its writer was killed there
  auto opened = open(memory()).value();
  HostPool successor(kPool);
  successor.observe(opened.get());
  for (const SlabPlace& place : opened->slabs()) {
    const auto slab = successor.adopt(place);
    ASSERT_TRUE(slab.has_value());
    for (std::uint32_t i = 0; i < place.capacity; ++i) {
      EXPECT_EQ(opened->adopt(*slab, i).state, BlockState::kNone);
    }
    opened->note_root({digest(5), digest(99), "other", "default"});
    for (std::uint32_t i = 0; i < place.capacity; ++i) {
      EXPECT_EQ(opened->state(*slab, i), BlockState::kNone);
    }
  }
  successor.observe(nullptr);
}

TEST_F(PoolCatalogueTest, ADamagedUserMakesThePoolOneThatIsNotServed) {
  catalogue_->note_user(*ipc::ProcessRef::of_pid(::getpid()), digest(1),
                        catalogue::UserKind::kMover);
  auto* user = reinterpret_cast<catalogue::User*>(bytes() + catalogue::kPage);
  user->pid += 1;
  EXPECT_EQ(open(memory()).error().code, ErrorCode::kProtocol);
}

TEST_F(PoolCatalogueTest, ADamagedSlabMakesThePoolOneThatIsNotServed) {
  store(1);
  const catalogue::Layout layout(pool_.stats().pages, pool_.stats().page_bytes);
  auto* slab = reinterpret_cast<catalogue::Slab*>(bytes() + layout.slabs);
  slab->shard_stride += 1;
  EXPECT_EQ(open(memory()).error().code, ErrorCode::kProtocol);
}

TEST_F(PoolCatalogueTest, ASlotWhoseRecordIsDamagedIsNobodysUntilNobodyWrites) {
  const PrefixIndex::Token token = reserve(1);
  ASSERT_NE(index_.begin_fill(client_, token), nullptr);
  first_record()->before = digest(3);
  EXPECT_EQ(adopted(), (std::vector{BlockState::kTaken}));
  EXPECT_EQ(damaged_, 1U);
  EXPECT_EQ(adopted(), (std::vector{BlockState::kTaken})) << "by the one after that";
}

TEST_F(PoolCatalogueTest, WhatIsDamagedIsNotMadeWholeByItsChecksums) {
  store(1);
  const HostSlot slot = index_.acquire({root_, digest(1), ipc::GroupId{0}})->slot();
  const std::vector<std::uint64_t> sums(shape_of().sums(), 5);
  first_record()->block = digest(2);
  catalogue_->on_awaited(slot, ipc::JobId{7}, 1);
  catalogue_->on_summed(slot, sums);
  EXPECT_TRUE(read().visible.empty());
  first_record()->block = digest(1);
  catalogue_->on_summed(slot, sums);
  EXPECT_EQ(read().visible.size(), 1U);
}

// Each byte of what was written: a block is then as it was, or it is not there.
TEST_F(PoolCatalogueTest, ADamagedByteNeverMakesAnotherBlock) {
  for (std::uint64_t i = 1; i <= 6; ++i) store(i, i % 2, digest(i - 1));
  const Reading whole = read();
  ASSERT_EQ(whole.visible.size(), 6U);
  std::byte* const memory_bytes = bytes();
  const std::vector<std::byte> kept(memory_bytes, memory_bytes + catalogue_->size_bytes());
  std::vector<std::size_t> written;
  for (std::size_t i = 0; i < catalogue_->size_bytes(); ++i) {
    if (memory_bytes[i] != std::byte{0}) written.push_back(i);
  }
  std::mt19937_64 random(3);
  for (const std::size_t at : written) {
    memory_bytes[at] ^= static_cast<std::byte>(1U << (random() % 8));
    auto opened = open(memory());
    if (opened) {
      HostPool successor(kPool);
      successor.observe(opened->get());
      for (const SlabPlace& place : (*opened)->slabs()) {
        const auto slab = successor.adopt(place);
        if (!slab) continue;
        for (std::uint32_t i = 0; i < place.capacity; ++i) {
          if ((*opened)->state(*slab, i) != BlockState::kVisible) continue;
          const auto block = (*opened)->find(successor.adopt_slot(*slab, i));
          if (!block) continue;
          const auto known = whole.visible.find({block->root, block->block, place.shape.group});
          ASSERT_NE(known, whole.visible.end()) << "after byte " << at;
          EXPECT_EQ(known->second, block->before);
        }
      }
      successor.observe(nullptr);
    }
    std::copy(kept.begin(), kept.end(), memory_bytes);  // damaged records are emptied
  }
  EXPECT_EQ(read().visible.size(), 6U);
}

// Whatever happens, a manager that comes at that moment finds exactly what is visible, and knows of
// every slot that somebody has.
TEST_F(PoolCatalogueTest, AtEveryMomentItSaysWhatTheIndexHas) {
  std::mt19937_64 random(17);
  std::set<std::uint64_t> stored;
  std::vector<PrefixIndex::Token> open_ones;
  std::vector<PrefixIndex::Token> filling;
  std::vector<HostBlockRef> held;
  std::vector<HostBlockRef> sequences;
  for (int step = 0; step < 2000; ++step) {
    const std::uint64_t block = random() % 60;
    switch (random() % 9) {
      case 0:
      case 1:
      case 2:
        if (!index_.has({root_, digest(block), ipc::GroupId{block % 2 == 0 ? 0U : 1U}})) {
          const PrefixIndex::Token token =
              reserve(block, block % 2 == 0 ? 0 : 1, block > 2 ? digest(block - 2) : Digest{});
          if (token != 0) open_ones.push_back(token);
        }
        break;
      case 3:
        if (!open_ones.empty()) {
          held.push_back(index_.begin_fill(client_, open_ones.back()));
          filling.push_back(open_ones.back());
          open_ones.pop_back();
        }
        break;
      case 4:
        if (!filling.empty()) (void)index_.commit(filling);
        filling.clear();
        break;
      case 5:
        if (!open_ones.empty()) index_.discard(open_ones.back());
        if (!open_ones.empty()) open_ones.pop_back();
        break;
      case 6: held.clear(); break;
      case 7: {
        Extent extent;
        if (HostBlockRef taken = index_.allocate(shape_of(), extent)) {
          catalogue_->on_sequence(taken->slot(), root_, client_, static_cast<std::uint64_t>(step),
                                  0);
          sequences.push_back(std::move(taken));
        }
        if (sequences.size() > 4) sequences.erase(sequences.begin());
        break;
      }
      default:
        if (HostBlockRef reader =
                index_.acquire({root_, digest(block), ipc::GroupId{block % 2 == 0 ? 0U : 1U}})) {
          held.push_back(std::move(reader));
        }
        if (random() % 40 == 0) {
          (void)index_.drop_root(root_, [](const ipc::IncarnationId&) { return false; });
          open_ones.clear();
          filling.clear();
        }
        break;
    }
    const Reading reading = read();
    ASSERT_EQ(reading.visible.size(), index_.stats().visible) << "step " << step;
    ASSERT_EQ(reading.taken.size(), pool_.stats().blocks) << "step " << step;
    ASSERT_EQ(reading.slabs, pool_.stats().slabs) << "step " << step;
    ASSERT_EQ(reading.sequences.size(), sequences.size()) << "step " << step;
    for (const auto& [key, before] : reading.visible) {
      ASSERT_NE(index_.acquire(key), nullptr) << "step " << step;
    }
  }
}

TEST(HostPoolAdoptionTest, PlacesThatNoPoolMakesAreRefused) {
  HostPool pool(kPool);
  const std::uint64_t page = pool.stats().page_bytes;
  const auto pages = pool.stats().pages;
  SlabPlace good;
  good.pages = 2;
  good.capacity = 2;
  good.shape = shape_of();
  good.shard_base = 1024;
  good.shard_stride = 2048;
  ASSERT_TRUE(HostPool(kPool).adopt(good).has_value());
  const auto wrong = [&](auto change) {
    SlabPlace place = good;
    change(place);
    const auto adopted = pool.adopt(place);
    ASSERT_FALSE(adopted.has_value());
    EXPECT_EQ(adopted.error().code, ErrorCode::kInvalidArgument);
  };
  constexpr std::uint64_t kHuge = ~std::uint64_t{0};
  wrong([](SlabPlace& p) { p.pages = 0; });
  wrong([&](SlabPlace& p) { p.first_page = pages; });
  wrong([&](SlabPlace& p) { p.first_page = pages - 1; });
  wrong([](SlabPlace& p) { p.pages = 0xFFFFFFFF; });
  wrong([](SlabPlace& p) { p.capacity = 0; });
  wrong([](SlabPlace& p) { p.capacity = 3; });
  wrong([](SlabPlace& p) { p.capacity = 0xFFFFFFFF; });
  wrong([](SlabPlace& p) { p.shape.ranks = 0; });
  wrong([](SlabPlace& p) { p.shape.ranks = 0xFFFFFFFF; });
  wrong([](SlabPlace& p) { p.shape.bytes.shard_bytes = kHuge / 2; });
  wrong([](SlabPlace& p) { p.shape.bytes.replicated_bytes = kHuge; });
  wrong([](SlabPlace& p) { p.shape.bytes = {0, 0}; });
  wrong([](SlabPlace& p) {  // the product is one that fits in 32 bits
    p.shape.parts = ipc::kMostUnitBlocks;
    p.shape.ranks = 1U << 26U;
    p.shape.bytes = {64, 0};
    p.shard_stride = 0;
  });
  wrong([](SlabPlace& p) { p.shape.parts = 0; });
  wrong([](SlabPlace& p) { p.shape.parts = 3; });  // of which 1,024 bytes are no multiple
  wrong([](SlabPlace& p) { p.shape.parts = 2 * ipc::kMostUnitBlocks; });
  wrong([](SlabPlace& p) { p.shard_base = kHuge; });
  wrong([](SlabPlace& p) { p.shard_base = 1023; });
  wrong([](SlabPlace& p) { p.shard_stride = kHuge; });
  wrong([](SlabPlace& p) { p.shard_stride = 2047; });
  wrong([&](SlabPlace& p) { p.shard_stride = 2 * page; });
  ASSERT_TRUE(pool.adopt(good).has_value());
  wrong([](SlabPlace&) {});  // it is there
  wrong([](SlabPlace& p) { p.first_page = 1; });
}

TEST(HostPoolAdoptionTest, AnAdoptedSlabIsOneOfThePools) {
  HostPool pool(kPool);
  SlabPlace place;
  place.first_page = 3;
  place.pages = 2;
  place.capacity = 2;
  place.shape = shape_of();
  place.shard_base = 1024;
  place.shard_stride = 2048;
  const auto slab = pool.adopt(place);
  ASSERT_TRUE(slab.has_value());
  const HostSlot slot = pool.adopt_slot(*slab, 1);
  EXPECT_EQ(pool.offsets(slot, ipc::Rank{1}).shard,
            3 * pool.stats().page_bytes + 1024 + 2048 + 1024);
  EXPECT_EQ(pool.stats().blocks, 1U);
  const auto other = pool.allocate(shape_of(), {slot, 1});
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(*other, (HostSlot{*slab, 0, slot.generation})) << "the slot that is left";
  pool.free(slot);
  pool.free(*other);
  EXPECT_EQ(pool.stats().free_pages, pool.stats().pages);
  const auto unused = pool.adopt(place);
  ASSERT_TRUE(unused.has_value());
  pool.close_if_unused(*unused);
  EXPECT_EQ(pool.stats().slabs, 0U);
}

}  // namespace
}  // namespace kvferry::cache_manager
