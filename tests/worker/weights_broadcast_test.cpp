// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Weights that rank 0 broadcasts: the stores of several ranks, each on a device and a thread of its
// own. What they hold in the end is what loading the file for themselves gives them.
#include "ipc/os/temp_dir.hpp"
#include "support/safetensors_writer.hpp"
#include "weights_store.hpp"
#include "worker/host_device.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::BroadcastId;
using ipc::ComponentStrategy;
using ipc::Deadline;
using ipc::ErrorCode;
using ipc::Result;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

// Several pieces, of which one crosses the border of two ranks' rows; and one that all ranks have.
const std::vector<test::WrittenTensor> kModel{{"embed", "U8", {2, 5 << 20}},
                                              {"head", "F32", {6, 10}},
                                              {"norm", "F32", {7}},
                                              {"none", "U8", {0}}};

struct RankStore {
  RankStore(const std::string& name,
            std::uint32_t rank,
            std::uint32_t ranks,
            bool replicated,
            ComponentStrategy strategy)
      : device(open(name)),
        allocator(*device),
        tables(*device, allocator),
        store(*device, allocator, tables, ipc::Rank{rank}, ranks, replicated, strategy) {}
  static std::unique_ptr<ipc::Device> open(const std::string& name) {
    ipc::DeviceSpec spec;
    spec.host_name = name;
    spec.host_capacity_bytes = 128ULL << 20;
    return ipc::open_device(spec);
  }
  std::vector<std::uint64_t> table() {
    const auto address = tables.address(Deadline::after(20s));
    if (!address) return {};
    const auto* words = static_cast<const std::uint64_t*>(address->raw());
    return {words, words + std::size_t{2} * kernels::kModelWords};
  }
  std::unique_ptr<ipc::Device> device;
  CachingAllocator allocator;
  ModelTables tables;
  WeightsStore store;
};

class WeightsBroadcastTest : public testing::Test {
 protected:
  void make(std::uint32_t ranks,
            bool replicated = true,
            ComponentStrategy strategy = ComponentStrategy::kResident) {
    // Some names of tests have a slash.
    std::string name = test::unique_device_name().substr(0, 60);
    std::replace(name.begin(), name.end(), '/', '.');
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      ranks_.push_back(std::make_unique<RankStore>(fmt::format("{}-{}", name, rank), rank, ranks,
                                                   replicated, strategy));
    }
  }
  [[nodiscard]] std::string write(std::uint64_t seed,
                                  const std::vector<test::WrittenTensor>& model = kModel) const {
    const auto file = temp_.path() / fmt::format("{}.safetensors", seed);
    test::write_safetensors(file, model, seed);
    return file.string();
  }
  /// All ranks prepare at the same time, but for one that is missing.
  std::vector<Result<std::uint64_t>> prepare(const BroadcastId& id,
                                             ipc::Duration patience = 30s,
                                             std::optional<std::uint32_t> missing = {}) {
    std::vector<Result<std::uint64_t>> outcomes(ranks_.size(),
                                                KVFERRY_ERROR(kNotReady, "it was not asked"));
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      if (rank == missing) continue;
      threads.emplace_back([&, rank] {
        outcomes[rank] = ranks_[rank]->store.prepare_broadcast(id, Deadline::after(patience));
        if (outcomes[rank] || missing) return;
        for (auto& other : ranks_) other->store.cancel();  // As a manager does.
      });
    }
    for (std::thread& thread : threads) thread.join();
    return outcomes;
  }
  void update(const std::string& file) {
    const bool again = kept_group().has_value();
    const auto id = ranks_[0]->store.open_broadcast(file, again);
    ASSERT_TRUE(id.has_value()) << id.error().to_string();
    for (const auto& prepared : prepare(*id)) {
      ASSERT_TRUE(prepared.has_value()) << prepared.error().to_string();
    }
    for (auto& rank : ranks_) {
      const auto committed = rank->store.commit(Deadline::after(20s));
      ASSERT_TRUE(committed.has_value()) << committed.error().to_string();
    }
  }
  /// The group that all ranks have kept.
  [[nodiscard]] std::optional<ipc::Digest> kept_group() const {
    std::optional<ipc::Digest> kept;
    for (const auto& rank : ranks_) {
      const ipc::Digest group = rank->store.broadcast_port().value().group;
      if (group.is_zero() || (kept && *kept != group)) return std::nullopt;
      kept = group;
    }
    return kept;
  }
  /// Every byte, and what the model computes with, is that of a load from the file.
  void expect_as_loaded(std::uint64_t seed, const std::string& file) {
    for (std::uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      WeightsStore& store = ranks_[rank]->store;
      const auto ranks = static_cast<std::uint32_t>(ranks_.size());
      ASSERT_EQ(store.tensors().size(), kModel.size());
      for (std::size_t t = 0; t < kModel.size(); ++t) {
        const LoadedTensor& tensor = store.tensors()[t];
        const bool rows = kModel[t].shape[0] % ranks == 0;
        const auto* bytes = tensor.host.empty()
                                ? static_cast<const std::byte*>(tensor.memory.address().raw())
                                : tensor.host.data();
        for (std::uint64_t i = 0; i < tensor.size_bytes; ++i) {
          const std::uint64_t place = i + (rows ? tensor.size_bytes * rank : 0);
          ASSERT_EQ(bytes[i], test::byte_of(tensor.name, seed, place))
              << "rank " << rank << " " << tensor.name << " " << i;
        }
      }
      const auto broadcast = ranks_[rank]->table();
      ASSERT_TRUE(store.prepare({ipc::WeightsFrom::kDisk, file}, Deadline::after(20s)));
      ASSERT_TRUE(store.commit(Deadline::after(20s)));
      EXPECT_EQ(ranks_[rank]->table(), broadcast) << "rank " << rank;
    }
  }
  [[nodiscard]] std::vector<std::uint64_t> used() const {
    std::vector<std::uint64_t> bytes;
    for (const auto& rank : ranks_) bytes.push_back(rank->allocator.stats().used_bytes);
    return bytes;
  }

  const test::ShortTempDir temp_;
  std::vector<std::unique_ptr<RankStore>> ranks_;
};

class WeightsBroadcastStrategyTest : public WeightsBroadcastTest,
                                     public testing::WithParamInterface<ComponentStrategy> {};

TEST_P(WeightsBroadcastStrategyTest, EveryRankComesToWhatTheFileGivesIt) {
  make(2, /*replicated=*/true, GetParam());
  const std::string first = write(1);
  const std::string second = write(2);
  ASSERT_NO_FATAL_FAILURE(update(first));  // The first load of all takes memory of its own.
  for (auto& rank : ranks_) ASSERT_TRUE(rank->store.give_up(Deadline::after(20s)));
  ASSERT_NO_FATAL_FAILURE(update(second));
  const auto after_one = used();
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(2, second));
  ASSERT_NO_FATAL_FAILURE(update(first));
  EXPECT_EQ(used(), after_one);
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(1, first));
}

INSTANTIATE_TEST_SUITE_P(Keeps,
                         WeightsBroadcastStrategyTest,
                         testing::Values(ComponentStrategy::kResident,
                                         ComponentStrategy::kOffloaded,
                                         ComponentStrategy::kLayerwise),
                         [](const auto& strategy) {
                           return std::string(to_string(strategy.param));
                         });

TEST_F(WeightsBroadcastTest, RowsThatCannotBeDealtOutGoToAll) {
  make(3, /*replicated=*/false);
  const std::string file = write(5);
  ASSERT_NO_FATAL_FAILURE(update(file));
  EXPECT_EQ(ranks_[2]->store.tensors()[0].size_bytes, 10U << 20);
  EXPECT_EQ(ranks_[2]->store.tensors()[1].size_bytes, 80U);
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(5, file));
}

TEST_F(WeightsBroadcastTest, AFileThatIsNoneOrOfAnotherModelIsFoundBeforeAnyRankIsAsked) {
  make(2);
  EXPECT_EQ(ranks_[0]->store.open_broadcast("/nowhere", false).error().code, ErrorCode::kNotFound);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  const auto other = ranks_[0]->store.open_broadcast(write(2, {{"embed", "U8", {3}}}), false);
  ASSERT_FALSE(other.has_value());
  EXPECT_EQ(other.error().code, ErrorCode::kGeometryMismatch);
}

TEST_F(WeightsBroadcastTest, ARankThatFailsFailsAllAndTheNextUpdateWorks) {
  make(2);
  const std::string file = write(1);
  ASSERT_NO_FATAL_FAILURE(update(file));
  const auto before = used();
  // Rank 1 has no room for what is to come.
  std::vector<std::unique_ptr<ipc::DeviceMemory>> taken;
  for (std::uint64_t size = 64 << 20; size >= 2 << 20; size /= 2) {
    while (auto piece = ranks_[1]->device->allocate(size, ipc::HandleKind::kLegacy, nullptr)) {
      taken.push_back(std::move(*piece));
    }
  }
  (void)ranks_[1]->allocator.empty_cache(ipc::EmptyReason::kUpdate);
  while (auto piece = ranks_[1]->device->allocate(2 << 20, ipc::HandleKind::kLegacy, nullptr)) {
    taken.push_back(std::move(*piece));
  }
  const std::string second = write(2);
  const auto id = ranks_[0]->store.open_broadcast(second, false);
  ASSERT_TRUE(id.has_value());
  const auto outcomes = prepare(*id);
  EXPECT_EQ(outcomes[1].error().code, ErrorCode::kNoDeviceMemory);
  EXPECT_EQ(outcomes[0].error().code, ErrorCode::kCancelled) << outcomes[0].error().to_string();
  for (auto& rank : ranks_) rank->store.abandon();
  taken.clear();
  EXPECT_EQ(used(), before) << "what was prepared is let go of";
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(1, file));
  ASSERT_NO_FATAL_FAILURE(update(second));
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(2, second));
}

TEST_F(WeightsBroadcastTest, AFileThatIsCutOffMeanwhileFailsAll) {
  make(2);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  const std::string file = write(2);
  const auto id = ranks_[0]->store.open_broadcast(file, false);
  ASSERT_TRUE(id.has_value());
  ASSERT_EQ(::truncate(file.c_str(), 4 << 20), 0);
  const auto outcomes = prepare(*id);
  EXPECT_THAT(outcomes[0].error().message, HasSubstr(file));
  // It is told, or finds rank 0 gone.
  EXPECT_EQ(outcomes[1].error().code, ErrorCode::kCancelled);
  for (auto& rank : ranks_) rank->store.abandon();
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(1, write(1)));
}

TEST_F(WeightsBroadcastTest, ARankThatDoesNotComeEndsItAtTheDeadline) {
  make(2);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  const auto id = ranks_[0]->store.open_broadcast(write(2), false);
  ASSERT_TRUE(id.has_value());
  const auto outcomes = prepare(*id, 200ms, /*missing=*/1);
  EXPECT_EQ(outcomes[0].error().code, ErrorCode::kTimeout);
  // What it had opened is gone with it.
  EXPECT_EQ(prepare(*id, 200ms, 1)[0].error().code, ErrorCode::kStaleEpoch);
  const auto late = prepare(*id, 200ms, 0)[1];
  EXPECT_EQ(late.error().code, ErrorCode::kCancelled);
  EXPECT_THAT(late.error().message, HasSubstr("finds no rank 0 to join"));
}

TEST_F(WeightsBroadcastTest, AGroupIsKeptUntilItFailsOrTheWeightsAreReleased) {
  make(2);
  EXPECT_EQ(kept_group(), std::nullopt);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  const auto first = kept_group();
  ASSERT_TRUE(first.has_value());
  ASSERT_NO_FATAL_FAILURE(update(write(2)));
  EXPECT_EQ(kept_group(), first);
  const std::string file = write(2);
  // A failure at one rank leaves none that could be used, whatever the others think.
  const auto id = ranks_[0]->store.open_broadcast(file, true);
  ASSERT_TRUE(id.has_value());
  EXPECT_EQ(ipc::group_name(*id), *first);
  ASSERT_EQ(::truncate(file.c_str(), 4 << 20), 0);
  for (const auto& failed : prepare(*id)) EXPECT_FALSE(failed.has_value());
  for (auto& rank : ranks_) rank->store.abandon();
  EXPECT_EQ(kept_group(), std::nullopt);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  EXPECT_TRUE(kept_group().has_value());
  EXPECT_NE(kept_group(), first);
  ASSERT_TRUE(ranks_[1]->store.release(ipc::WeightsBackup::kHost, Deadline::after(20s)));
  EXPECT_EQ(kept_group(), std::nullopt);
  ASSERT_TRUE(ranks_[1]->store.resume(Deadline::after(20s)));
  ASSERT_NO_FATAL_FAILURE(update(write(3)));
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(3, write(3)));
}

TEST_F(WeightsBroadcastTest, UpdatesFromElsewhereLetGoOfTheGroup) {
  make(2);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  ASSERT_TRUE(ranks_[0]->store.prepare({ipc::WeightsFrom::kDisk, write(2)}, Deadline::after(20s)));
  EXPECT_TRUE(ranks_[0]->store.broadcast_port().value().group.is_zero());
  EXPECT_FALSE(ranks_[1]->store.broadcast_port().value().group.is_zero()) << "it was not told";
  ASSERT_NO_FATAL_FAILURE(update(write(3)));
  ASSERT_NO_FATAL_FAILURE(expect_as_loaded(3, write(3)));
}

TEST_F(WeightsBroadcastTest, ARankThatLostItsGroupIsFoundOutInTime) {
  make(2);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  const auto id = ranks_[0]->store.open_broadcast(write(2), true);
  ASSERT_TRUE(id.has_value());
  ranks_[1]->store.abandon();  // As another process would, in its place.
  const auto outcomes = prepare(*id, 5s);
  EXPECT_FALSE(outcomes[0].has_value());
  EXPECT_THAT(outcomes[1].error().message, HasSubstr("finds no rank 0 to join"));
}

TEST_F(WeightsBroadcastTest, ReleasedWeightsAreNotPrepared) {
  make(2);
  ASSERT_NO_FATAL_FAILURE(update(write(1)));
  ASSERT_TRUE(ranks_[0]->store.release(ipc::WeightsBackup::kHost, Deadline::after(20s)));
  EXPECT_EQ(ranks_[0]->store.open_broadcast(write(2), false).error().code, ErrorCode::kNotReady);
  ASSERT_TRUE(ranks_[0]->store.resume(Deadline::after(20s)));
  ASSERT_TRUE(ranks_[1]->store.release(ipc::WeightsBackup::kHost, Deadline::after(20s)));
  const auto id = ranks_[0]->store.open_broadcast(write(2), false);
  ASSERT_TRUE(id.has_value());
  const auto outcomes = prepare(*id);
  EXPECT_EQ(outcomes[1].error().code, ErrorCode::kNotReady);
  EXPECT_FALSE(outcomes[0].has_value());
}

TEST_F(WeightsBroadcastTest, WhoTakesMessagesAloneSaysSo) {
  make(1);
  EXPECT_TRUE(ranks_[0]->store.broadcast_port().has_value());
  WeightsStore alone(*ranks_[0]->device, ranks_[0]->allocator, ranks_[0]->tables, ipc::Rank{0}, 2,
                     false, ComponentStrategy::kResident, /*broadcasts=*/false);
  EXPECT_THAT(alone.broadcast_port().error().message, HasSubstr("--weights-broadcast messages"));
}

}  // namespace
}  // namespace kvferry::worker
