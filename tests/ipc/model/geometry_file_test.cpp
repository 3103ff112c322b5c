// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace kvferry::ipc {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class GeometryFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "geometry-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::string path() const { return (folder_ / "model.toml").string(); }
  Result<Geometry> load(std::string_view text, std::uint32_t ranks = 1) const {
    std::ofstream(path()) << text;
    return load_geometry(path(), ranks);
  }
  [[nodiscard]] std::string error(std::string_view text, std::uint32_t ranks = 1) const {
    const Result<Geometry> geometry = load(text, ranks);
    if (geometry) return "accepted";
    EXPECT_EQ(geometry.error().code, ErrorCode::kInvalidArgument);
    return geometry.error().message;
  }

  std::filesystem::path folder_;
};

constexpr std::string_view kGood = R"(name = "mine"
tokens_per_block = 32
kv_order = "value-first"
[[group]]
name = "main"
[[group.regions]]
kind = "key-value"
layers = 2
dtype = "bf16"
kv_heads = 4
head_dim = 64
)";

std::string with(std::string_view from, std::string_view to) {
  std::string text(kGood);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST_F(GeometryFileTest, ReadsWhatIsWritten) {
  const Result<Geometry> geometry = load(kGood, 2);
  ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
  Geometry expected;
  expected.name = "mine";
  expected.tokens_per_block = 32;
  expected.ranks = 2;
  expected.key_before_value = false;
  GroupSpec& group = expected.groups.emplace_back();
  group.name = "main";
  for (const std::uint32_t layer : {0U, 1U}) {
    for (const RegionKind kind : {RegionKind::kValue, RegionKind::kKey}) {
      group.regions.push_back(RegionSpec{kind, DataType::kBf16, layer, false, 32ULL * 2 * 64 * 2});
    }
  }
  EXPECT_EQ(*geometry, expected);
}

TEST_F(GeometryFileTest, ReadsTheDocumentedExample) {
  const Result<Geometry> geometry = load_geometry(KVFERRY_GEOMETRY_EXAMPLE, 2);
  ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
  ASSERT_EQ(geometry->groups.size(), 3U);
  EXPECT_EQ(geometry->groups[0].regions.size(), 16U * 3 + 2);
  EXPECT_EQ(geometry->groups[0].regions[48],
            (RegionSpec{RegionKind::kLatent, DataType::kBf16, 24, true, 16ULL * 576 * 2}));
  EXPECT_EQ(geometry->groups[1].window_blocks, 64U);
  EXPECT_EQ(geometry->groups[2].blocks_percent, 150U);
  EXPECT_EQ(geometry->groups[2].regions[0],
            (RegionSpec{RegionKind::kDraft, DataType::kBf16, 26, false, 16ULL * 1024 * 2}));
}

TEST_F(GeometryFileTest, ReadsAPresetWrittenAsAFile) {
  const Result<Geometry> geometry = load(R"(name = "deepseek-v3"
tokens_per_block = 64
[[group]]
name = "main"
[[group.regions]]
kind = "latent"
layers = 61
dtype = "bf16"
replicated = true
elements_per_token = 576
)",
                                         8);
  ASSERT_TRUE(geometry.has_value()) << geometry.error().to_string();
  EXPECT_EQ(*geometry, *load_geometry("deepseek-v3", 8));
}

TEST_F(GeometryFileTest, ErrorsNameFileLineKeyAndValue) {
  struct Case {
    std::string text;
    int line;
    const char* key;
    const char* value;
  };
  const std::vector<Case> cases = {
      {with("32", "0"), 2, "tokens_per_block", "0"},
      {with("32", "-1"), 2, "tokens_per_block", "-1"},
      {with("32", "99999999"), 2, "tokens_per_block", "99999999"},
      {with("32", "\"many\""), 2, "tokens_per_block", "\"many\""},
      {with("32", "1.5"), 2, "tokens_per_block", "1.5"},
      {with("\"mine\"", "7"), 1, "name", "7"},
      {with("value-first", "sideways"), 3, "kv_order", "sideways"},
      {with("kv_order", "kvorder"), 3, "kvorder", "unknown key"},
      {with("\"bf16\"", "\"fp12\""), 9, "group[0].regions[0].dtype", "fp12"},
      {with("kv_heads = 4", "kv_heads = 0"), 10, "group[0].regions[0].kv_heads", "0"},
      {with("layers = 2", "layers = true"), 8, "group[0].regions[0].layers", "true"},
      {with("layers = 2", "layers = 9223372036854775807"), 8, "layers", "9223372036854775807"},
      {with("head_dim = 64", "head_size = 64"), 11, "group[0].regions[0].head_size", "unknown"},
      {with("head_dim = 64", ""), 6, "group[0].regions[0].head_dim", "missing"},
      {with("key-value", "values"), 7, "group[0].regions[0].kind", "values"},
      {with("name = \"main\"", "name = \"main\"\nrule = \"half\""), 6, "group[0].rule", "half"},
      {with("name = \"main\"", "name = \"main\"\nwindow_blocks = 2"), 6, "window_blocks", "full"},
      {with("name = \"main\"", "name = \"main\"\nrule = \"sliding-window\""), 4,
       "group[0].window_blocks", "missing"},
      {with("name = \"main\"", "name = \"main\"\nblocks_percent = 0"), 6, "blocks_percent", "0"},
  };
  for (const Case& bad : cases) {
    EXPECT_THAT(error(bad.text), AllOf(HasSubstr(fmt::format("{}:{}: ", path(), bad.line)),
                                       HasSubstr(bad.key), HasSubstr(bad.value)))
        << bad.text;
  }
}

TEST_F(GeometryFileTest, PlainRegionsSayWhetherTheyAreReplicatedAndHowLarge) {
  const std::string head =
      "name = \"x\"\ntokens_per_block = 16\n[[group]]\nname = \"main\"\n"
      "[[group.regions]]\nkind = \"state\"\nlayers = 1\ndtype = \"fp32\"\n";
  EXPECT_THAT(error(head + "bytes_per_block = 64\n"), HasSubstr("replicated is missing"));
  EXPECT_THAT(error(head + "replicated = 1\nbytes_per_block = 64\n"), HasSubstr("true or false"));
  EXPECT_THAT(error(head + "replicated = true\n"), HasSubstr("exactly one of"));
  EXPECT_THAT(error(head + "replicated = true\nbytes_per_block = 64\nelements_per_token = 4\n"),
              HasSubstr("exactly one of"));
  EXPECT_THAT(error(head + "replicated = true\nbytes_per_block = 63\n"), HasSubstr("no multiple"));
  EXPECT_THAT(error(head + "replicated = true\nbytes_per_block = 2000000000\n"),
              HasSubstr("2000000000"));
  EXPECT_THAT(error(head + "replicated = false\nbytes_per_block = 64\n", 3),
              AllOf(HasSubstr(":5: "), HasSubstr("64 bytes per block"), HasSubstr("3 ranks")));
  EXPECT_EQ(error(head + "replicated = true\nbytes_per_block = 64\n", 3), "accepted");
  EXPECT_EQ(error(head + "replicated = false\nbytes_per_block = 64\n", 4), "accepted");
}

TEST_F(GeometryFileTest, RanksThatDoNotDivideTheHeadsNameTheLine) {
  EXPECT_THAT(error(std::string(kGood), 3),
              AllOf(HasSubstr(path() + ":6: "), HasSubstr("4 KV heads"), HasSubstr("3 ranks"),
                    HasSubstr("1, 2, 4")));
}

TEST_F(GeometryFileTest, DuplicateGroupsNameTheSecond) {
  const std::string text = std::string(kGood) + std::string(kGood.substr(kGood.find("[[group]]")));
  EXPECT_THAT(error(text), AllOf(HasSubstr(path() + ":13: "), HasSubstr("group[1].name"),
                                 HasSubstr("\"main\"")));
}

TEST_F(GeometryFileTest, LayersBeyondTheLastNumberAreRefused) {
  EXPECT_THAT(error(with("layers = 2", "layers = 2\nfirst_layer = 4095")), HasSubstr("layer is"));
}

TEST_F(GeometryFileTest, GroupsMustBeTables) {
  EXPECT_THAT(error("name = \"x\"\ntokens_per_block = 16\ngroup = [1, 2]\n"),
              HasSubstr("an array of 2 elements"));
  EXPECT_THAT(error("name = \"x\"\ntokens_per_block = 16\ngroup = []\n"), HasSubstr("[[group]]"));
  EXPECT_THAT(error("name = \"x\"\ntokens_per_block = 16\n"), HasSubstr("group is missing"));
}

TEST_F(GeometryFileTest, BrokenTomlNamesTheLine) {
  EXPECT_THAT(error("name = \"x\"\ntokens = = 3\n"), HasSubstr(path() + ":2: no valid TOML"));
  EXPECT_THAT(error(std::string("name = \"\0\xff\"\n", 11)), HasSubstr("no valid TOML"));
}

TEST_F(GeometryFileTest, MissingFileIsNotFound) {
  const Result<Geometry> geometry = load_geometry(path(), 1);
  ASSERT_FALSE(geometry.has_value());
  EXPECT_EQ(geometry.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(geometry.error().message, HasSubstr(path()));
}

TEST_F(GeometryFileTest, WhatIsNoRegularFileIsRefusedWithoutBlocking) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_THAT(load_geometry(path(), 1).error().message, HasSubstr("no regular file"));
}

TEST_F(GeometryFileTest, HugeFileIsRefused) {
  EXPECT_THAT(error(std::string((1U << 20) + 1, '#')), HasSubstr("larger than"));
}

}  // namespace
}  // namespace kvferry::ipc
