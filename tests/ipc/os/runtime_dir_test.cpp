// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/runtime_dir.hpp"

#include "ipc/os/temp_dir.hpp"
#include "os/socket_address.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

mode_t mode_of(const std::filesystem::path& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

class ScopedUmask {
 public:
  explicit ScopedUmask(mode_t mask) : old_(::umask(mask)) {}
  ScopedUmask(const ScopedUmask&) = delete;
  ScopedUmask& operator=(const ScopedUmask&) = delete;
  ~ScopedUmask() { ::umask(old_); }

 private:
  mode_t old_;
};

TEST(RuntimeDirTest, CreatesPrivateDirectoriesWhateverTheUmask) {
  for (const mode_t mask : {mode_t{0}, mode_t{022}, mode_t{0277}}) {
    const test::ShortTempDir temp;
    const ScopedUmask umask(mask);
    const auto dir = RuntimeDir::open((temp / "a").native(), "one");
    ASSERT_TRUE(dir.has_value()) << dir.error().to_string();
    EXPECT_EQ(dir->path(), temp / "a" / "one");
    EXPECT_EQ(mode_of(temp / "a"), 0700U);
    EXPECT_EQ(mode_of(temp / "a" / "one"), 0700U);
    EXPECT_EQ(dir->rank_socket("chat", 3, "lease"), temp / "a" / "one" / "chat.3.lease");
  }
}

TEST(RuntimeDirTest, RefusesAWiderModeAndLeavesIt) {
  const test::ShortTempDir temp;
  std::filesystem::create_directory(temp / "one");
  ASSERT_EQ(::chmod((temp / "one").c_str(), 0755), 0);
  const auto dir = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_FALSE(dir.has_value());
  EXPECT_EQ(dir.error().code, ErrorCode::kPermission);
  EXPECT_THAT(dir.error().message, HasSubstr("0755"));
  EXPECT_EQ(mode_of(temp / "one"), 0755U);
}

TEST(RuntimeDirTest, RefusesABaseThatOthersCanRewrite) {
  const test::ShortTempDir temp;
  ASSERT_EQ(::chmod(temp.path().c_str(), 0777), 0);
  const auto dir = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_FALSE(dir.has_value());
  EXPECT_EQ(dir.error().code, ErrorCode::kPermission);
  EXPECT_FALSE(std::filesystem::exists(temp / "one"));
}

TEST(RuntimeDirTest, RefusesSymbolicLinks) {
  const test::ShortTempDir temp;
  std::filesystem::create_directory(temp / "real");
  ASSERT_EQ(::chmod((temp / "real").c_str(), 0700), 0);
  std::filesystem::create_directory_symlink(temp / "real", temp / "link");
  for (const auto& [base, instance] :
       {std::pair(temp.path().native(), "link"), std::pair((temp / "link").native(), "one")}) {
    const auto dir = RuntimeDir::open(base, instance);
    ASSERT_FALSE(dir.has_value()) << base << " " << instance;
    EXPECT_EQ(dir.error().code, ErrorCode::kPermission);
  }
}

TEST(RuntimeDirTest, RefusesAForeignOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a directory away";
  const test::ShortTempDir temp;
  std::filesystem::create_directory(temp / "one");
  ASSERT_EQ(::chmod((temp / "one").c_str(), 0700), 0);
  ASSERT_EQ(::chown((temp / "one").c_str(), 12345, 12345), 0);
  const auto dir = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_FALSE(dir.has_value());
  EXPECT_EQ(dir.error().code, ErrorCode::kPermission);
  EXPECT_THAT(dir.error().message, HasSubstr("12345"));
}

TEST(RuntimeDirTest, RefusesBadInstanceNamesAndLongPaths) {
  const test::ShortTempDir temp;
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("a/b"), std::string("a b"),
        std::string(33, 'x'), std::string("a\0b", 3)}) {
    const auto dir = RuntimeDir::open(temp.path().native(), name);
    ASSERT_FALSE(dir.has_value()) << name;
    EXPECT_EQ(dir.error().code, ErrorCode::kInvalidArgument);
  }
  const auto dir = RuntimeDir::open((temp / std::string(100, 'd')).native(), "one");
  ASSERT_FALSE(dir.has_value());
  EXPECT_EQ(dir.error().code, ErrorCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(temp / std::string(100, 'd')));
}

TEST(RuntimeDirTest, TheLastOneToLetGoRemovesItWhenItIsEmpty) {
  const test::ShortTempDir temp;
  auto one = RuntimeDir::open(temp.path().native(), "one");
  auto two = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(one && two);
  auto copy = std::make_optional(*one);
  one = KVFERRY_ERROR(kCancelled, "let go");
  two = KVFERRY_ERROR(kCancelled, "let go");
  EXPECT_TRUE(std::filesystem::exists(temp / "one")) << "a copy still uses it";
  copy.reset();
  EXPECT_FALSE(std::filesystem::exists(temp / "one"));
  one = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(one) << one.error().to_string();
  std::ofstream(temp / "one" / "left");
  one = KVFERRY_ERROR(kCancelled, "let go");
  EXPECT_TRUE(std::filesystem::exists(temp / "one" / "left"));
}

TEST(RuntimeDirTest, TheLastOneToLetGoRemovesSocketsThatHaveNoLockAndNothingElse) {
  for (const bool with_file : {false, true}) {
    const test::ShortTempDir temp;
    const std::filesystem::path folder = temp / "one";
    {
      const auto dir = RuntimeDir::open(temp.path().native(), "one");
      ASSERT_TRUE(dir.has_value());
      for (const auto& path : {dir->control_socket(), dir->rank_socket("chat", 3, "stepctl")}) {
        ASSERT_TRUE(listen_on_path(path, SOCK_STREAM).has_value()) << path;
      }
      if (with_file) std::ofstream(dir->rank_socket("chat", 4, "stepctl")) << "somebody's";
    }
    EXPECT_EQ(std::filesystem::exists(folder), with_file);
    if (with_file) {
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);
    }
  }
}

TEST(RuntimeDirTest, ASuccessorOfTheSameNameIsNotRemoved) {
  const test::ShortTempDir temp;
  auto old = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(old);
  std::filesystem::rename(temp / "one", temp / "elsewhere");
  const auto next = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(next);
  old = KVFERRY_ERROR(kCancelled, "let go");
  EXPECT_TRUE(std::filesystem::exists(temp / "one"));
}

TEST(RuntimeDirTest, OpeningAndLeavingAtOnceNeverFails) {
  const test::ShortTempDir temp;
  std::vector<std::thread> threads;
  std::atomic<int> failed = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        const auto dir = RuntimeDir::open(temp.path().native(), "one");
        if (!dir || !std::filesystem::exists(dir->path())) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_FALSE(std::filesystem::exists(temp / "one"));
}

TEST(RuntimeDirTest, FindCreatesNothingAndChecksAsOpenDoes) {
  const test::ShortTempDir temp;
  EXPECT_EQ(RuntimeDir::find((temp / "base").native(), "one").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(RuntimeDir::find(temp.path().native(), "one").error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
  const auto dir = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(dir);
  {
    const auto found = RuntimeDir::find(temp.path().native(), "one");
    ASSERT_TRUE(found) << found.error().to_string();
    EXPECT_EQ(found->registry_socket(), dir->registry_socket());
  }
  ASSERT_TRUE(std::filesystem::exists(temp / "one"));
  ASSERT_EQ(::chmod((temp / "one").c_str(), 0755), 0);
  EXPECT_EQ(RuntimeDir::find(temp.path().native(), "one").error().code, ErrorCode::kPermission);
  ASSERT_EQ(::chmod((temp / "one").c_str(), 0700), 0);
}

TEST(NameLockTest, RefusesASecondHolderAndNamesTheFirst) {
  const test::ShortTempDir temp;
  std::optional<NameLock> lock = *NameLock::acquire(temp / "name");
  const auto second = NameLock::acquire(temp / "name");
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(second.error().message, HasSubstr(std::to_string(::getpid())));
  lock.reset();
  EXPECT_TRUE(std::filesystem::is_empty(temp.path()));
  EXPECT_TRUE(NameLock::acquire(temp / "name").has_value());
}

TEST(NameLockTest, NamesThatLivingProcessesHoldAreListed) {
  const test::ShortTempDir temp;
  const auto dir = RuntimeDir::open(temp.path().native(), "one");
  ASSERT_TRUE(dir.has_value());
  const auto names = [&] {
    std::vector<std::pair<std::string, pid_t>> held;
    const auto listed = dir->held_names();
    EXPECT_TRUE(listed.has_value());
    for (const HeldName& item : *listed) held.emplace_back(item.name, item.pid);
    return held;
  };
  EXPECT_THAT(names(), IsEmpty());
  std::optional<NameLock> lock = *NameLock::acquire(dir->rank_socket("chat", 0, "lease"));
  std::ofstream(dir->path() / "chat.1.lease.lock") << "1 1 1\n";  // Nobody holds it.
  std::ofstream(dir->path() / "note") << "text";
  EXPECT_THAT(names(), ElementsAre(Pair("chat.0.lease", ::getpid())));
  // What cannot be told is not passed over.
  std::filesystem::create_symlink(dir->path() / "note", dir->path() / "chat.2.lease.lock");
  EXPECT_THAT(names(),
              UnorderedElementsAre(Pair("chat.0.lease", ::getpid()), Pair("chat.2.lease", 0)));
  std::filesystem::remove(dir->path() / "chat.2.lease.lock");
  lock.reset();
  EXPECT_THAT(names(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(dir->path() / "chat.1.lease.lock")) << "it only looks";
  std::filesystem::remove_all(dir->path());
  EXPECT_EQ(dir->held_names().error().code, ErrorCode::kSystem);
}

TEST(NameLockTest, TakesOverALeftoverLockFile) {
  const test::ShortTempDir temp;
  std::ofstream(temp / "name.lock") << "1\n";
  const auto lock = NameLock::acquire(temp / "name");
  ASSERT_TRUE(lock.has_value()) << lock.error().to_string();
  std::string pid;
  std::ifstream(temp / "name.lock") >> pid;
  EXPECT_EQ(pid, std::to_string(::getpid()));
}

TEST(NameLockTest, RefusesASymbolicLink) {
  const test::ShortTempDir temp;
  std::ofstream(temp / "precious") << "text";
  std::filesystem::create_symlink(temp / "precious", temp / "name.lock");
  const auto lock = NameLock::acquire(temp / "name");
  ASSERT_FALSE(lock.has_value());
  EXPECT_EQ(lock.error().code, ErrorCode::kPermission);
  EXPECT_EQ(std::filesystem::file_size(temp / "precious"), 4U);
}

TEST(NameLockTest, AssignmentRemovesTheOldName) {
  const test::ShortTempDir temp;
  NameLock lock = *NameLock::acquire(temp / "a");
  lock = *NameLock::acquire(temp / "b");
  EXPECT_FALSE(std::filesystem::exists(temp / "a.lock"));
  EXPECT_TRUE(std::filesystem::exists(temp / "b.lock"));
}

// Holders come and go while others try: the unlink of one must never let two in.
TEST(NameLockTest, NeverHasTwoHoldersWhenTheFileIsRemovedAndMadeAgain) {
  const test::ShortTempDir temp;
  std::atomic<int> holders{0};
  std::atomic<bool> doubled{false};
  {
    std::vector<std::jthread> threads;
    constexpr int kThreads = 4;
    constexpr int kTurns = 50;
    threads.reserve(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int turns = 0; turns < kTurns;) {
          const auto lock = NameLock::acquire(temp / "name");
          if (!lock) {
            std::this_thread::yield();
            continue;
          }
          ++turns;
          if (holders.fetch_add(1) != 0) doubled = true;
          holders.fetch_sub(1);
        }
      });
    }
  }
  EXPECT_FALSE(doubled);
}

}  // namespace
}  // namespace kvferry::ipc
