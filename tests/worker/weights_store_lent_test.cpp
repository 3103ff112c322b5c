// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Weights that are lent, into stores whose tensors are not on the device between two loads.
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/weights_exporter.hpp"
#include "worker/weights_store_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::ComponentStrategy;
using testing::Bool;
using testing::Combine;
using testing::Values;

/// The model's tensors in device memory, lent on a real socket.
class Lender {
 public:
  Lender(ipc::Device& device, const std::string& runtime_dir, std::uint64_t seed)
      : socket_(
            ipc::RuntimeDir::open(runtime_dir, "test").value().weights_socket("trainer").value()),
        memory_(device.allocate(1 << 20, ipc::HandleKind::kVmm, nullptr).value()) {
    auto* const bytes = static_cast<std::byte*>(memory_->address().raw());
    std::vector<ExportedTensor> tensors;
    std::uint64_t offset = 0;
    for (const test::WrittenTensor& tensor : kModel) {
      std::uint64_t size = tensor.dtype == "BF16" ? 2 : tensor.dtype == "F32" ? 4 : 1;
      for (const std::uint64_t dimension : tensor.shape) size *= dimension;
      for (std::uint64_t i = 0; i < size; ++i) {
        bytes[offset + i] = test::byte_of(tensor.name, seed, i);
      }
      tensors.push_back({tensor.name, tensor.dtype, tensor.shape, memory_->address() + offset});
      offset += size;
    }
    exporter_ = WeightsExporter::start(device, {runtime_dir, "test", "trainer"}, std::move(tensors))
                    .value();
  }
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  ~Lender() {
    EXPECT_TRUE(exporter_->close(Deadline::after(20s)).has_value());
    EXPECT_TRUE(memory_->release().has_value());
  }
  [[nodiscard]] ipc::WeightsSource source() const { return {WeightsFrom::kIpc, socket_.string()}; }
  [[nodiscard]] std::size_t borrowers() const { return exporter_->borrowers(); }

 private:
  const std::filesystem::path socket_;
  std::unique_ptr<ipc::DeviceMemory> memory_;
  std::unique_ptr<WeightsExporter> exporter_;
};

/// Its strategy, and whether it is the second rank of two that share regions.
class LentWeightsTest : public WeightsStrategyTest,
                        public testing::WithParamInterface<std::tuple<ComponentStrategy, bool>> {
 protected:
  [[nodiscard]] static ComponentStrategy strategy() { return std::get<0>(GetParam()); }
  [[nodiscard]] static std::uint32_t ranks() { return std::get<1>(GetParam()) ? 2 : 1; }
  [[nodiscard]] static std::uint32_t rank() { return ranks() - 1; }
  [[nodiscard]] WeightsStore make_store(ComponentStrategy strategy) {
    return {*device_, allocator_, tables_, ipc::Rank{rank()}, ranks(), ranks() > 1, strategy};
  }
  /// What the model computes with, of a file's weights that stay on the device.
  std::vector<std::uint64_t> resident_tables(std::uint64_t seed) {
    WeightsStore resident = make_store(ComponentStrategy::kResident);
    load(resident, write(seed));
    return tables();
  }
  [[nodiscard]] Lender lend(std::uint64_t seed) const {
    return Lender(*device_, temp_.path().string(), seed);
  }
  static void prepare(WeightsStore& store, const Lender& lender) {
    const auto prepared = store.prepare(lender.source(), Deadline::after(20s));
    ASSERT_TRUE(prepared.has_value()) << prepared.error().to_string();
    EXPECT_EQ(lender.borrowers(), 0U) << "a commit needs nobody else";
  }
  /// All that is on the device between two uses.
  void expect_in_host_memory(WeightsStore& store, std::uint64_t seed, std::uint64_t tables_only) {
    ASSERT_TRUE(store.give_up(Deadline::after(20s)).has_value());
    EXPECT_EQ(store.device_bytes(), 0U);
    EXPECT_EQ(used(), tables_only);
    expect_host_holds(store, seed, rank(), ranks());
  }
};

TEST_P(LentWeightsTest, AreWhatAFileOfThemWouldBe) {
  const std::vector<std::uint64_t> first = resident_tables(1);
  const std::vector<std::uint64_t> second = resident_tables(2);
  const std::uint64_t tables_only = used();
  WeightsStore store = make_store(strategy());
  // As the first load, over tensors in host memory, and over what a file brought.
  for (const std::uint64_t seed : {1U, 2U, 1U}) {
    const Lender lender = lend(seed);
    ASSERT_NO_FATAL_FAILURE(prepare(store, lender));
    ASSERT_TRUE(store.commit(Deadline::after(20s)).has_value());
    EXPECT_EQ(tables(), seed == 1 ? first : second);
    if (strategy() == ComponentStrategy::kOffloaded) {
      EXPECT_GT(store.device_bytes(), 0U);
      ASSERT_NO_FATAL_FAILURE(expect_holds(store, seed, rank(), ranks()));
    }
    ASSERT_NO_FATAL_FAILURE(expect_in_host_memory(store, seed, tables_only));
  }
  ASSERT_NO_FATAL_FAILURE(load(store, write(2)));
  EXPECT_EQ(tables(), second);
  ASSERT_NO_FATAL_FAILURE(expect_in_host_memory(store, 2, tables_only));
}

TEST_P(LentWeightsTest, AbandonedTheyLeaveWhatIsInUseInHostMemory) {
  const std::vector<std::uint64_t> first = resident_tables(1);
  const std::uint64_t tables_only = used();
  WeightsStore store = make_store(strategy());
  ASSERT_NO_FATAL_FAILURE(load(store, write(1)));
  ASSERT_NO_FATAL_FAILURE(expect_in_host_memory(store, 1, tables_only));
  const Lender lender = lend(2);
  ASSERT_NO_FATAL_FAILURE(prepare(store, lender));
  EXPECT_GT(used(), tables_only) << "all that is lent has been copied";
  ASSERT_NO_FATAL_FAILURE(expect_host_holds(store, 1, rank(), ranks()));
  store.abandon();
  EXPECT_EQ(tables(), first);
  ASSERT_NO_FATAL_FAILURE(expect_in_host_memory(store, 1, tables_only));
}

INSTANTIATE_TEST_SUITE_P(
    Of,
    LentWeightsTest,
    Combine(Values(ComponentStrategy::kOffloaded, ComponentStrategy::kLayerwise), Bool()),
    [](const auto& param) {
      return std::string(to_string(std::get<0>(param.param))) +
             (std::get<1>(param.param) ? "OfTwoRanks" : "OfOneRank");
    });

}  // namespace
}  // namespace kvferry::worker
