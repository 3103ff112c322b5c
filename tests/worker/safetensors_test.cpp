// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "safetensors.hpp"

#include "ipc/os/temp_dir.hpp"
#include "support/safetensors_writer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <string>

namespace kvferry::worker {
namespace {

using ipc::ErrorCode;
using test::write_safetensors;
using testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::filesystem::path path() const { return temp_.path() / "w.safetensors"; }
  /// A file with this header and so many bytes of data.
  void write(const std::string& header, std::size_t data_bytes) const {
    std::ofstream out(path(), std::ios::binary);
    const std::uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out << header << std::string(data_bytes, 'x');
  }
  [[nodiscard]] ipc::Error error() const {
    const auto file = SafetensorsFile::open(path());
    if (file) {
      ADD_FAILURE() << "it was taken";
      return {};
    }
    EXPECT_THAT(file.error().message, HasSubstr(path().string()));
    return file.error();
  }

  const test::ShortTempDir temp_;
};

TEST_F(SafetensorsTest, ReadsWhatWasWritten) {
  write_safetensors(path(), {{"b", "BF16", {4, 8}}, {"a", "U8", {16}}, {"empty", "F32", {0, 4}}},
                    7);
  const auto file = SafetensorsFile::open(path());
  ASSERT_TRUE(file.has_value()) << file.error().to_string();
  ASSERT_EQ(file->tensors().size(), 3U);
  EXPECT_EQ(file->tensors()[0].name, "b") << "in the order of their bytes";
  EXPECT_EQ(describe(file->tensors()[0]), "BF16 [4, 8]");
  EXPECT_EQ(file->tensors()[1].size_bytes, 16U);
  std::array<std::byte, 16> bytes{};
  ASSERT_TRUE(file->read(file->tensors()[1].offset, bytes).has_value());
  EXPECT_EQ(bytes[3], test::byte_of("a", 7, 3));
}

TEST_F(SafetensorsTest, RefusesWhatIsNoFile) {
  EXPECT_EQ(SafetensorsFile::open(path()).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::open(temp_.path()).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::open("/dev/zero").error().code, ErrorCode::kInvalidArgument);
  std::ofstream(path()) << "short";
  EXPECT_THAT(error().message, HasSubstr("5 bytes are no safetensors file"));
}

TEST_F(SafetensorsTest, RefusesBrokenHeaders) {
  const auto refused = [this](const std::string& header, std::size_t data, const char* why) {
    write(header, data);
    EXPECT_THAT(error().message, HasSubstr(why)) << header;
  };
  refused("{", 0, "no JSON object");
  refused("[]", 0, "no JSON object");
  refused(R"({"t":5})", 0, "tensor 't': it is no object");
  refused(R"({"t":{"shape":[1],"data_offsets":[0,4]}})", 4, "no dtype");
  refused(R"({"t":{"dtype":"F9","shape":[1],"data_offsets":[0,4]}})", 4, "dtype F9 is not known");
  refused(R"({"t":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4,
          "its shape holds a number that is no");
  refused(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "no range");
  refused(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "no range");
  refused(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4, "no range");
  refused(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "does not take");
  refused(R"({"t":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4,
          "does not take");
  refused(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5, "it starts at byte");
  refused(
      R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
      6, "it starts at byte");
  refused(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 9, "cut off, or is none");
}

TEST_F(SafetensorsTest, DeepNestingIsRefusedAndNotFollowed) {
  for (const std::size_t depth : {5U, 200'000U}) {
    const std::string open(depth, '[');
    const std::string close(depth, ']');
    write(R"({"t":{"dtype":"U8","shape":)" + open + close + R"(,"data_offsets":[0,0]}})", 0);
    EXPECT_THAT(error().message, HasSubstr("nested deeper than 4")) << depth;
  }
}

TEST_F(SafetensorsTest, RefusesAHeaderLongerThanTheFile) {
  const std::uint64_t length = UINT64_MAX;
  std::ofstream(path(), std::ios::binary)
      .write(reinterpret_cast<const char*>(&length), sizeof(length));
  EXPECT_THAT(error().message, HasSubstr("a header of 18446744073709551615 bytes"));
}

TEST_F(SafetensorsTest, NoticesAFileThatIsCutOffMeanwhile) {
  write_safetensors(path(), {{"a", "U8", {4096}}}, 1);
  const auto file = SafetensorsFile::open(path());
  ASSERT_TRUE(file.has_value());
  std::filesystem::resize_file(path(), 1000);
  std::array<std::byte, 4096> bytes{};
  const auto read = file->read(file->tensors()[0].offset, bytes);
  ASSERT_FALSE(read.has_value());
  EXPECT_THAT(read.error().message, HasSubstr("cut off meanwhile"));
}

}  // namespace
}  // namespace kvferry::worker
