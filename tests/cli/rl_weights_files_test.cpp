// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/os/temp_dir.hpp"
#include "rl/weights_files.hpp"
#include "safetensors.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace kvferry::cli {
namespace {

using testing::HasSubstr;

constexpr std::uint64_t kTotal = 1ULL << 20;

std::string contents(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

class WeightsFilesTest : public testing::Test {
 protected:
  const test::ShortTempDir temp_;
};

class WeightsFilesRanksTest : public WeightsFilesTest,
                              public testing::WithParamInterface<std::uint32_t> {};

TEST_P(WeightsFilesRanksTest, AreSafetensorsOfVariedShapesThatTheWorkerReads) {
  const std::uint32_t ranks = GetParam();
  const auto versions = write_weights_versions(temp_ / "weights", kTotal, ranks, 5);
  ASSERT_TRUE(versions) << versions.error().to_string();
  ASSERT_EQ(versions->size(), kWeightsVersions);
  for (const WeightsVersion& version : *versions) {
    const auto file = worker::SafetensorsFile::open(version.file);
    ASSERT_TRUE(file) << file.error().to_string();
    const auto expected = model_tensors(kTotal, ranks);
    ASSERT_EQ(file->tensors().size(), expected.size());
    std::uint64_t bytes = 0;
    std::uint32_t even = 0;
    std::set<std::string> types;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const worker::TensorInfo& tensor = file->tensors()[i];
      EXPECT_EQ(tensor.name, expected[i].name);
      EXPECT_EQ(tensor.shape, expected[i].dimensions);
      EXPECT_EQ(tensor.size_bytes, expected[i].size_bytes());
      bytes += tensor.size_bytes;
      types.insert(tensor.dtype);
      even += !tensor.shape.empty() && tensor.shape[0] % ranks == 0 ? 1U : 0U;
    }
    EXPECT_NEAR(static_cast<double>(bytes), static_cast<double>(kTotal), 0.05 * kTotal);
    EXPECT_GE(types.size(), 3U);
    EXPECT_GE(even, 2U);
    if (ranks > 1) {
      EXPECT_GE(expected.size() - even, 2U) << "not all can be dealt out";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, WeightsFilesRanksTest, testing::Values(1, 2, 3, 8));

TEST_F(WeightsFilesTest, RepeatExactlyFromSeedAndVersion) {
  const auto tensors = model_tensors(kTotal, 2);
  const auto written = [&](const char* name, std::uint64_t seed, std::uint32_t version) {
    EXPECT_TRUE(write_weights(temp_ / name, tensors, seed, version));
    return contents(temp_ / name);
  };
  const std::string first = written("a", 1, 0);
  EXPECT_EQ(first, written("b", 1, 0));
  EXPECT_NE(first, written("c", 1, 1));
  EXPECT_NE(first, written("d", 2, 0));
}

TEST_F(WeightsFilesTest, EveryVersionHasAnIdentityOfItsOwn) {
  std::set<std::string> ids;
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    for (std::uint32_t version = 0; version < kWeightsVersions; ++version) {
      EXPECT_FALSE(weights_id(seed, version).is_zero());
      EXPECT_EQ(weights_id(seed, version), weights_id(seed, version));
      ids.insert(weights_id(seed, version).hex());
    }
  }
  EXPECT_EQ(ids.size(), 4 * kWeightsVersions);
}

TEST_F(WeightsFilesTest, TinyAndLargeSizesAreWhole) {
  for (const std::uint64_t total : {1ULL, 3'000'017ULL}) {
    const auto versions = write_weights_versions(temp_ / std::to_string(total), total, 7, 0);
    ASSERT_TRUE(versions);
    for (const WeightsVersion& version : *versions) {
      EXPECT_TRUE(worker::SafetensorsFile::open(version.file));
    }
  }
}

TEST_F(WeightsFilesTest, AFolderThatCannotBeWrittenIsNamed) {
  const auto versions = write_weights_versions("/dev/null/weights", kTotal, 1, 0);
  ASSERT_FALSE(versions);
  EXPECT_THAT(versions.error().message, HasSubstr("/dev/null/weights"));
  const auto full = write_weights("/dev/full", model_tensors(kTotal, 1), 0, 0);
  ASSERT_FALSE(full);
  EXPECT_THAT(full.error().message, HasSubstr("/dev/full"));
}

}  // namespace
}  // namespace kvferry::cli
