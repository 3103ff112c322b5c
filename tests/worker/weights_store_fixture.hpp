// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "support/safetensors_writer.hpp"
#include "weights_store.hpp"
#include "worker/host_device.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::WeightsFrom;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using test::write_safetensors;

inline const std::vector<test::WrittenTensor> kModel{{"embed", "BF16", {1000, 64}},
                                                     {"head", "F32", {6, 10}},
                                                     {"norm", "F32", {7}},
                                                     {"none", "U8", {0}}};

class WeightsStoreTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::string write(std::uint64_t seed,
                                  const std::vector<test::WrittenTensor>& model = kModel) const {
    const auto file = temp_.path() / fmt::format("{}.safetensors", seed);
    write_safetensors(file, model, seed);
    return file.string();
  }
  static ipc::WeightsSource disk(const std::string& file) { return {WeightsFrom::kDisk, file}; }
  static void load(WeightsStore& store, const std::string& file) {
    const auto prepared = store.prepare(disk(file), Deadline::after(20s));
    ASSERT_TRUE(prepared.has_value()) << prepared.error().to_string();
    const auto committed = store.commit(Deadline::after(20s));
    ASSERT_TRUE(committed.has_value()) << committed.error().to_string();
  }
  /// Every byte of the rank's part is what the file of that seed holds.
  static void expect_holds(const WeightsStore& store,
                           std::uint64_t seed,
                           std::uint32_t rank,
                           std::uint32_t ranks) {
    ASSERT_EQ(store.tensors().size(), kModel.size());
    for (std::size_t t = 0; t < kModel.size(); ++t) {
      const LoadedTensor& tensor = store.tensors()[t];
      const std::uint64_t size = tensor.memory.size_bytes();
      const bool rows = kModel[t].shape[0] % ranks == 0;
      const auto* bytes = reinterpret_cast<const std::byte*>(tensor.memory.address().address);
      for (std::uint64_t i = 0; i < size; ++i) {
        const std::uint64_t place = i + (rows ? size * rank : 0);
        ASSERT_EQ(bytes[i], test::byte_of(tensor.name, seed, place)) << tensor.name << " " << i;
      }
    }
  }

  const test::ShortTempDir temp_;
  const std::unique_ptr<ipc::Device> device_ = test::open_host_device(256ULL << 20);
  /// What the model reads with, behind what it writes with.
  std::vector<std::uint64_t> tables() {
    const auto address = tables_.address(Deadline::after(20s));
    EXPECT_TRUE(address.has_value());
    const auto* words = static_cast<const std::uint64_t*>(address->raw());
    return {words, words + std::size_t{2} * kernels::kModelWords};
  }

  CachingAllocator allocator_{*device_};
  ModelTables tables_{*device_, allocator_};
};

/// Where the tensors are between two loads.
class WeightsStrategyTest : public WeightsStoreTest {
 protected:
  static std::uint64_t host_bytes(const WeightsStore& store) {
    std::uint64_t total = 0;
    for (const LoadedTensor& tensor : store.tensors()) total += tensor.host.size();
    return total;
  }
  static void expect_host_holds(const WeightsStore& store,
                                std::uint64_t seed,
                                std::uint32_t rank = 0,
                                std::uint32_t ranks = 1) {
    ASSERT_EQ(store.tensors().size(), kModel.size());
    for (std::size_t t = 0; t < kModel.size(); ++t) {
      const LoadedTensor& tensor = store.tensors()[t];
      ASSERT_EQ(tensor.host.size(), tensor.size_bytes);
      const std::uint64_t first = kModel[t].shape[0] % ranks == 0 ? tensor.size_bytes * rank : 0;
      for (std::uint64_t i = 0; i < tensor.size_bytes; ++i) {
        ASSERT_EQ(tensor.host[i], test::byte_of(tensor.name, seed, first + i))
            << tensor.name << " " << i;
      }
    }
  }
  /// What the model computes with, of weights that stay on the device.
  std::vector<std::uint64_t> tables_of(std::uint64_t seed) {
    WeightsStore resident(*device_, allocator_, tables_, ipc::Rank{0}, 1, false);
    load(resident, write(seed));
    return tables();
  }
  /// With the tables; what the allocator takes of all else is its cache.
  [[nodiscard]] std::uint64_t used() const { return allocator_.stats().used_bytes; }

  static constexpr std::uint64_t kTensors = 1000 * 64 * 2 + 6 * 10 * 4 + 7 * 4;
};

}  // namespace kvferry::worker
