// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/calibration_file.hpp"

#include "cache_manager/calibration/curves.hpp"
#include "ipc/os/temp_dir.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <thread>

namespace kvferry::cache_manager {
namespace {

namespace fs = std::filesystem;
using ipc::ErrorCode;
using testing::HasSubstr;

class CalibrationFileTest : public testing::Test {
 protected:
  void write(std::string_view text) {
    fs::create_directories(file_.parent_path());
    fs::remove(file_);
    std::ofstream out(file_, std::ios::binary);
    out << text;
    out.close();
    ASSERT_EQ(::chmod(file_.c_str(), 0600), 0);
  }
  [[nodiscard]] ErrorCode refusal() const {
    const auto loaded = load_calibration(file_, samples::key());
    EXPECT_FALSE(loaded.has_value());
    if (loaded) return ErrorCode{};
    EXPECT_FALSE(loaded.error().message.empty());
    return loaded.error().code;
  }

  test::ShortTempDir dir_;
  const fs::path file_ = calibration_file(dir_ / "cache" / "kvferry", samples::key());
};

TEST_F(CalibrationFileTest, ComesBackAsItWasSaved) {
  const Calibration saved = samples::h200();
  ASSERT_TRUE(save_calibration(file_, saved).has_value());
  const auto loaded = load_calibration(file_, saved.key);
  ASSERT_TRUE(loaded.has_value()) << loaded.error().to_string();
  EXPECT_EQ(*loaded, saved);
  struct stat info {};
  ASSERT_EQ(::stat(file_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600U);
  // And over it, with nothing left beside it.
  ASSERT_TRUE(save_calibration(file_, saved).has_value());
  EXPECT_EQ(std::distance(fs::directory_iterator(file_.parent_path()), {}), 1);
}

TEST_F(CalibrationFileTest, NothingIsThereAtFirst) { EXPECT_EQ(refusal(), ErrorCode::kNotFound); }

TEST_F(CalibrationFileTest, WhateverItWasMeasuredWithMustBeTheSame) {
  ASSERT_TRUE(save_calibration(file_, samples::h200()).has_value());
  const std::vector<std::pair<std::function<void(CalibrationKey&)>, const char*>> changes = {
      {[](CalibrationKey& key) { key.device.name = "NVIDIA H100"; }, "the device is 'NVIDIA H100'"},
      {[](CalibrationKey& key) { key.device.uuid = "GPU-2"; }, "uuid is 'GPU-2'"},
      {[](CalibrationKey& key) { key.device.link = "x8"; }, "link is 'x8', was '0000:3b"},
      {[](CalibrationKey& key) { key.device.driver = "590"; }, "driver is '590', was '580.159.03"},
      {[](CalibrationKey& key) { key.device.runtime = "13.1"; }, "CUDA runtime is '13.1'"},
      {[](CalibrationKey& key) { key.order = ipc::ArenaOrder::kLayerFirstMany; }, "the arena is"},
      {[](CalibrationKey& key) { key.fingerprint = ipc::Digest::from_words(1, 1); }, "geometry"}};
  for (const auto& [change, message] : changes) {
    CalibrationKey now = samples::key();
    change(now);
    const auto loaded = load_calibration(file_, now);
    ASSERT_FALSE(loaded.has_value()) << message;
    EXPECT_EQ(loaded.error().code, ErrorCode::kStaleEpoch);
    EXPECT_THAT(loaded.error().message, HasSubstr(message));
  }
  Calibration later = samples::h200();
  later.key.version = kCalibrationVersion + 1;
  write(to_text(later));
  EXPECT_EQ(refusal(), ErrorCode::kVersionMismatch);
}

TEST_F(CalibrationFileTest, DevicesAndGeometriesHaveFilesOfTheirOwnInsideTheDirectory) {
  CalibrationKey other = samples::key();
  other.device.uuid = "../../etc/passwd\n";
  EXPECT_EQ(calibration_file("/cache", other).parent_path(), "/cache");
  EXPECT_NE(calibration_file("/cache", other), calibration_file("/cache", samples::key()));
  other = samples::key();
  other.fingerprint = ipc::Digest::from_words(1, 1);
  EXPECT_NE(calibration_file("/cache", other), calibration_file("/cache", samples::key()));
  other = samples::key();
  other.device.driver = "other";  // takes the old one's place
  EXPECT_EQ(calibration_file("/cache", other), calibration_file("/cache", samples::key()));
}

TEST_F(CalibrationFileTest, EveryCutOfAFileIsDamage) {
  const std::string whole = to_text(samples::h200());
  for (std::size_t size = 0; size + 2 < whole.size(); ++size) {
    ASSERT_FALSE(parse_calibration(std::string_view(whole).substr(0, size)).has_value()) << size;
  }
  write(std::string_view(whole).substr(0, whole.size() / 2));
  EXPECT_EQ(refusal(), ErrorCode::kProtocol);
  write("");
  EXPECT_EQ(refusal(), ErrorCode::kProtocol);
}

TEST_F(CalibrationFileTest, ChangedBytesNeverMakeACalibrationThatCannotBeUsed) {
  const std::string whole = to_text(samples::h200());
  std::mt19937_64 random(3);
  const std::string bytes = "0123456789-+.eE{}[],:\"nulltrue\\\x80\xff ";
  for (int round = 0; round < 20'000; ++round) {
    std::string damaged = whole;
    for (std::uint64_t i = 0, count = 1 + random() % 4; i < count; ++i) {
      damaged[random() % damaged.size()] = bytes[random() % bytes.size()];
    }
    const auto parsed = parse_calibration(damaged);
    ASSERT_TRUE(!parsed || check_calibration(*parsed).has_value()) << damaged;
  }
}

TEST_F(CalibrationFileTest, FiguresThatNobodyMeasuredAreRefused) {
  const std::vector<std::function<void(Calibration&)>> damages = {
      [](Calibration& c) { c.to_host.clear(); },
      [](Calibration& c) { c.to_device.push_back(c.to_device[0]); },
      [](Calibration& c) { c.to_host[0] = {}; },
      [](Calibration& c) { c.to_host[0].block_bytes = 0; },
      [](Calibration& c) { c.to_host[0].block_bytes = ~0ULL; },
      [](Calibration& c) { c.to_host[0].regions = 0; },
      [](Calibration& c) {
        c.to_host[0].blocks = {2, 4, 16, 32};
      },
      [](Calibration& c) {
        c.to_host[0].blocks = {1, 16, 4, 32};
      },
      [](Calibration& c) {
        c.to_host[0].blocks = {1, 1, 16, 32};
      },
      [](Calibration& c) {
        c.to_host[0].blocks = {1, 4, 16, 1U << 31};
      },
      [](Calibration& c) { c.to_host[0].large_us.pop_back(); },
      [](Calibration& c) { c.to_host[0].large_us[0] = 0; },
      [](Calibration& c) { c.to_host[0].strategies.pop_back(); },
      [](Calibration& c) { c.to_host[0].strategies[1].us.push_back(1); },
      [](Calibration& c) { c.to_host[0].strategies[1].us[2] = -1; },
      [](Calibration& c) { c.to_host[0].strategies[1].us[2] = 1e300; },
      [](Calibration& c) {
        c.to_host[0].strategies[1].us[2] = std::numeric_limits<double>::quiet_NaN();
      },
      [](Calibration& c) { c.key.device.name.assign(100'000, 'x'); },
  };
  for (std::size_t i = 0; i < damages.size(); ++i) {
    Calibration damaged = samples::h200();
    damages[i](damaged);
    EXPECT_FALSE(check_calibration(damaged).has_value()) << i;
    write(to_text(damaged));
    EXPECT_EQ(refusal(), ErrorCode::kProtocol) << i;
  }
  for (const char* text : {"null", "[]", "7", "\"text\"", "{}", R"({"kvferry_calibration": "1"})",
                           R"({"kvferry_calibration": -1})", R"({"kvferry_calibration": 2})",
                           R"({"kvferry_calibration": 2, "device": [], "d2h": {}, "h2d": 3})"}) {
    write(text);
    EXPECT_EQ(refusal(), ErrorCode::kProtocol) << text;
  }
  write(std::string(100'000, '['));
  EXPECT_EQ(refusal(), ErrorCode::kProtocol);
}

TEST_F(CalibrationFileTest, WhatOthersMayHavePutThereIsNotRead) {
  write(to_text(samples::h200()));
  ASSERT_EQ(::chmod(file_.c_str(), 0666), 0);
  EXPECT_EQ(refusal(), ErrorCode::kPermission);
  fs::remove(file_);
  ASSERT_EQ(::mkfifo(file_.c_str(), 0600), 0);  // whoever opens it for reading waits
  EXPECT_EQ(refusal(), ErrorCode::kInvalidArgument);
  fs::remove(file_);
  fs::create_directory(file_);
  EXPECT_EQ(refusal(), ErrorCode::kInvalidArgument);
  fs::remove(file_);
  const fs::path elsewhere = dir_ / "elsewhere";
  std::ofstream(elsewhere) << to_text(samples::h200());
  fs::create_symlink(elsewhere, file_);
  EXPECT_EQ(refusal(), ErrorCode::kSystem);
  fs::remove(file_);
  write(std::string(2ULL << 20, ' '));
  EXPECT_EQ(refusal(), ErrorCode::kInvalidArgument);
  // All of them give way to a new one, but the directory.
  fs::remove(file_);
  fs::create_symlink(elsewhere, file_);
  ASSERT_TRUE(save_calibration(file_, samples::h200()).has_value());
  EXPECT_TRUE(load_calibration(file_, samples::key()).has_value());
  EXPECT_FALSE(fs::is_symlink(file_));
}

TEST_F(CalibrationFileTest, AFolderThatCannotBeMadeIsAnError) {
  std::ofstream(dir_ / "cache") << "a file";
  const auto saved = save_calibration(file_, samples::h200());
  ASSERT_FALSE(saved.has_value());
  EXPECT_THAT(saved.error().message, HasSubstr("cache"));
}

TEST_F(CalibrationFileTest, WritersAtTheSameTimeLeaveAWholeFile) {
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([this] {
      for (int round = 0; round < 50; ++round) {
        EXPECT_TRUE(save_calibration(file_, samples::h200()).has_value());
        EXPECT_TRUE(load_calibration(file_, samples::key()).has_value());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(file_.parent_path()), {}), 1);
}

}  // namespace
}  // namespace kvferry::cache_manager
