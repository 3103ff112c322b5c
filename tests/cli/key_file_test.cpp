// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "key_file.hpp"

#include "ipc/os/temp_dir.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kKey = "0123456789abcdef0123456789ABCDEF";

class KeyFileTest : public testing::Test {
 protected:
  [[nodiscard]] fs::path file(const std::string& text, mode_t mode = 0600) const {
    const fs::path path = folder_ / "key";
    std::ofstream(path) << text;
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  [[nodiscard]] static ipc::Error error_of(const fs::path& path) {
    const auto key = read_key_file(path);
    EXPECT_FALSE(key) << "it was taken";
    return key ? ipc::Error{} : key.error();
  }

  const test::ShortTempDir folder_;
};

TEST_F(KeyFileTest, HasTheKeyAndBlanksAroundIt) {
  for (const std::string& text :
       {std::string(kKey), std::string(kKey) + "\n", "\n " + std::string(kKey) + "\t\r\n"}) {
    const auto key = read_key_file(file(text));
    ASSERT_TRUE(key) << key.error().message;
    EXPECT_EQ(key->hex(), "0123456789abcdef0123456789abcdef");
  }
  EXPECT_TRUE(read_key_file(file(kKey, 0400)));
}

TEST_F(KeyFileTest, MayBeBehindALink) {
  fs::create_symlink(file(kKey), folder_ / "link");
  EXPECT_TRUE(read_key_file(folder_ / "link"));
}

TEST_F(KeyFileTest, ThatOthersMayReadOrWriteIsRefusedWithItsModeAndTheRemedy) {
  for (const mode_t mode : {0644U, 0640U, 0620U, 0604U, 0602U}) {
    const fs::path path = file(kKey, mode);
    const ipc::Error error = error_of(path);
    EXPECT_EQ(error.code, ipc::ErrorCode::kPermission);
    EXPECT_THAT(error.message,
                AllOf(HasSubstr(fmt::format("{} has mode {:04o}", path.native(), mode)),
                      HasSubstr("chmod 600 " + path.native())));
  }
}

TEST_F(KeyFileTest, WithoutAKeyIsRefusedAndNothingOfItIsSaid) {
  const std::string secret = "5ec4e75ec4e75ec4e75ec4e75ec4e75e";
  for (const std::string& text :
       {std::string(), secret.substr(1), secret + "0", secret.substr(1) + "g",
        secret + " " + secret, secret + std::string(1'000, '\n') + secret}) {
    const ipc::Error error = error_of(file(text));
    EXPECT_EQ(error.code, ipc::ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.message, AllOf(HasSubstr((folder_ / "key").native()),
                                     HasSubstr("32 hexadecimal digits"), Not(HasSubstr("5ec4e7"))));
  }
  EXPECT_THAT(error_of(file(std::string(32, '0'))).message, HasSubstr("is zero"));
}

TEST_F(KeyFileTest, IsAFileAndNothingElse) {
  EXPECT_THAT(error_of(folder_ / "none").message, HasSubstr((folder_ / "none").native()));
  EXPECT_THAT(error_of(folder_ / "").message, HasSubstr("is no plain file"));
  const fs::path pipe = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(error_of(pipe).message, HasSubstr("is no plain file"));
}

}  // namespace
}  // namespace kvferry::cli
