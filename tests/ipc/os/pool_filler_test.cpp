// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/pool_filler.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "os/host_memory.hpp"
#include "os/huge_pages.hpp"
#include "os/numa_nodes.hpp"
#include "support/child_process.hpp"
#include "support/huge_pages.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace kvferry::ipc {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::uint64_t kPiece = PoolFiller::kPieceBytes;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kBytes = 5 * kPiece + kPiece / 2;

std::uint64_t allocated_bytes(const UniqueFd& fd) {
  struct stat info {};
  EXPECT_EQ(::fstat(fd.get(), &info), 0);
  constexpr std::uint64_t kBlock = 512;
  return static_cast<std::uint64_t>(info.st_blocks) * kBlock;
}

UniqueFd make_pool(std::uint64_t bytes) {
  return SharedMemory::create_large_pool("filler-test", bytes, false).value();
}

TEST(PoolFillerTest, PoolIsThereFromTheStartOnUntilAllOfItIs) {
  const UniqueFd fd = make_pool(kBytes);
  EXPECT_EQ(allocated_bytes(fd), 0U);
  std::vector<std::uint64_t> filled;  // called under the filler's lock
  PoolFiller filler(
      fd, {"filler-test", kBytes, 3, {}}, [&](std::uint64_t bytes) { filled.push_back(bytes); },
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(1, {}).has_value());
  EXPECT_GE(allocated_bytes(fd), kPiece);
  ASSERT_TRUE(filler.wait_filled(2 * kBytes, {}).has_value());  // more than it has: all
  EXPECT_EQ(allocated_bytes(fd), kBytes);
  ASSERT_FALSE(filled.empty());
  EXPECT_TRUE(std::is_sorted(filled.begin(), filled.end()));
  EXPECT_EQ(std::set<std::uint64_t>(filled.begin(), filled.end()).size(), filled.size());
  EXPECT_EQ(filled.back(), kBytes);
}

TEST(PoolFillerTest, WhoeverWaitsMayGiveUpAndItsEndLeavesTheRestEmpty) {
  constexpr std::uint64_t kLarge = 64 * kPiece;
  const UniqueFd fd = make_pool(kLarge);
  {
    PoolFiller filler(
        fd, {"filler-test", kLarge, 1, {}}, [](std::uint64_t) {},
        [](const Error& error) { ADD_FAILURE() << error.to_string(); });
    const Status waited = filler.wait_filled(kLarge, [] { return true; });
    ASSERT_FALSE(waited.has_value());
    EXPECT_EQ(waited.error().code, ErrorCode::kCancelled);
  }
  EXPECT_LT(allocated_bytes(fd), kLarge);
}

TEST(PoolFillerTest, PoolThatTheMachineHasNoRoomForIsRefusedAtOnce) {
  const auto refused = SharedMemory::create_large_pool("p", std::uint64_t{1} << 50, true);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kNoHostMemory);
}

TEST(PoolFillerTest, HugePagesAreTakenWhereTheMachineHasReservedThem) {
  if (free_huge_page_bytes() < kPiece) GTEST_SKIP() << "no huge pages are reserved here";
  const UniqueFd fd = SharedMemory::create_large_pool("filler-test", kPiece, true).value();
  EXPECT_TRUE(SharedMemory::is_of_huge_pages(fd));
  PoolFiller filler(
      fd, {"filler-test", kPiece, 1, {}}, [](std::uint64_t) {},
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  EXPECT_TRUE(filler.wait_filled(kPiece, {}).has_value());
  EXPECT_TRUE(SharedMemory::map_pool(fd, kPiece).has_value());
}

TEST(PoolFillerTest, PoolOfReservedHugePagesIsToldByItsDescriptor) {
  constexpr unsigned kHugePages = MFD_HUGETLB | (21U << 26U);  // MFD_HUGE_2MB
  const UniqueFd huge(::memfd_create("filler-test", MFD_CLOEXEC | kHugePages));
  if (!huge.valid()) GTEST_SKIP() << "this kernel has no huge pages to reserve";
  EXPECT_TRUE(SharedMemory::is_of_huge_pages(huge));
  EXPECT_FALSE(SharedMemory::is_of_huge_pages(make_pool(kPiece)));
  EXPECT_FALSE(SharedMemory::is_of_huge_pages(UniqueFd()));
}

TEST(PoolFillerTest, HugePagesAreMadeWhereTheKernelGivesNoneByItself) {
  if (!test::makes_huge_pages()) GTEST_SKIP() << "this kernel makes no huge pages of shared memory";
  const UniqueFd fd = make_pool(kBytes);
  PoolFiller filler(
      fd, {.name = "filler-test", .size_bytes = kBytes, .threads = 2}, [](std::uint64_t) {},
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(kBytes, {}).has_value());
  // All of it, but on a machine whose memory is in pieces.
  EXPECT_GE(filler.huge_page_bytes(), kPiece);
  const SharedMapping mapping = SharedMemory::map_pool(fd, kBytes).value();
  // One touch of each is enough for all of it.
  for (std::uint64_t at = 0; at < kBytes; at += kHugePageBytes) mapping.data()[at] = std::byte{1};
  EXPECT_GE(test::mapped_as_huge_bytes(mapping.data()), filler.huge_page_bytes());
}

TEST(PoolFillerTest, HugePagesAreSpreadOverNodesLikeSmallOnes) {
  constexpr std::uint64_t kPages = kHugePageBytes / kPage;
  for (std::uint64_t nodes = 1; nodes <= 16; ++nodes) {
    std::vector<std::uint64_t> on_node(nodes);
    for (std::uint64_t huge = 0; huge < 10 * nodes; ++huge) {
      const std::uint64_t offset = first_page_offset(huge, nodes, kPage);
      ASSERT_LT(offset, kHugePageBytes);
      ASSERT_EQ(offset % kPage, 0U);
      // How the kernel interleaves: by page of the file.
      ++on_node[(huge * kPages + offset / kPage) % nodes];
    }
    EXPECT_THAT(on_node, testing::Each(10U)) << nodes << " nodes";
  }
}

/// Pages of a mapping by the node that they are on.
std::vector<std::uint64_t> pages_by_node(std::byte* data, std::uint64_t size_bytes) {
  std::vector<std::uint64_t> counts;
  for (std::uint64_t at = 0; at < size_bytes; at += kPage) {
    int node = -1;
    EXPECT_EQ(::syscall(SYS_get_mempolicy, &node, nullptr, 0, data + at, MPOL_F_NODE | MPOL_F_ADDR),
              0);
    if (node < 0) continue;
    counts.resize(std::max(counts.size(), static_cast<std::size_t>(node) + 1));
    ++counts[static_cast<std::size_t>(node)];
  }
  return counts;
}

TEST(PoolFillerTest, PoolOfTwoNodesIsHalfOnEach) {
  if (!parse_numa_nodes("0,1").has_value()) GTEST_SKIP() << "no two NUMA nodes";
  for (const bool huge_pages : {false, true}) {
    const UniqueFd fd = make_pool(kPiece);
    PoolFiller filler(
        fd,
        {.name = "filler-test",
         .size_bytes = kPiece,
         .numa_nodes = {0, 1},
         .huge_pages = huge_pages},
        [](std::uint64_t) {}, [](const Error& error) { ADD_FAILURE() << error.to_string(); });
    ASSERT_TRUE(filler.wait_filled(kPiece, {}).has_value());
    const SharedMapping mapping = SharedMemory::map_pool(fd, kPiece).value();
    const std::vector<std::uint64_t> pages = pages_by_node(mapping.data(), kPiece);
    const bool is_half =
        pages.size() == 2 && *std::min_element(pages.begin(), pages.end()) > kPiece / kPage * 2 / 5;
    if (!huge_pages && !is_half)
      GTEST_SKIP() << "one of two nodes is full, or not for this process";
    EXPECT_TRUE(is_half) << testing::PrintToString(pages);
  }
}

TEST(PoolFillerTest, SmallPagesAreUsedOnRequest) {
  const UniqueFd fd = make_pool(kPiece);
  PoolFiller filler(
      fd, {.name = "filler-test", .size_bytes = kPiece, .huge_pages = false}, [](std::uint64_t) {},
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(kPiece, {}).has_value());
  EXPECT_EQ(filler.huge_page_bytes(), 0U);
  EXPECT_EQ(allocated_bytes(fd), kPiece);
}

TEST(PoolFillerTest, ContentsOfPagesThatAreThereStay) {
  const UniqueFd fd = make_pool(kPiece);
  const SharedMapping mapping = SharedMemory::map_pool(fd, kPiece).value();
  constexpr std::uint64_t kStep = 12'289;  // most pages, each at another place
  const auto value_at = [](std::uint64_t at) { return static_cast<std::byte>(at / kStep % 251); };
  for (std::uint64_t at = 0; at < kPiece; at += kStep) mapping.data()[at] = value_at(at);
  PoolFiller filler(
      fd, {.name = "filler-test", .size_bytes = kPiece}, [](std::uint64_t) {},
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(kPiece, {}).has_value());
  for (std::uint64_t at = 0; at < kPiece; at += kStep) {
    ASSERT_EQ(mapping.data()[at], value_at(at)) << at;
  }
}

TEST(PoolFillerTest, WhatIsThereAlreadyIsLeftAlone) {
  const UniqueFd fd = make_pool(kBytes);
  std::vector<std::uint64_t> filled;
  PoolFiller filler(
      fd, {.name = "filler-test", .size_bytes = kBytes, .threads = 1, .from_bytes = 2 * kPiece + 1},
      [&](std::uint64_t bytes) { filled.push_back(bytes); },
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(kBytes, {}).has_value());
  EXPECT_EQ(allocated_bytes(fd), kBytes - 2 * kPiece);
  ASSERT_FALSE(filled.empty());
  EXPECT_EQ(filled.front(), 3 * kPiece);
}

TEST(PoolFillerTest, PoolThatIsThereNeedsNoThread) {
  const UniqueFd fd = make_pool(kPiece);
  PoolFiller filler(
      fd, {.name = "filler-test", .size_bytes = kPiece, .from_bytes = kPiece},
      [](std::uint64_t) { ADD_FAILURE() << "nothing was to be filled"; },
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  ASSERT_TRUE(filler.wait_filled(kPiece, {}).has_value());
  EXPECT_EQ(allocated_bytes(fd), 0U);
}

TEST(PoolFillerTest, PagesCanBeAskedOfAnyNodeOfTheMachine) {
  const UniqueFd fd = make_pool(kPiece);
  PoolFiller filler(
      fd, {"filler-test", kPiece, 1, parse_numa_nodes("0").value()}, [](std::uint64_t) {},
      [](const Error& error) { ADD_FAILURE() << error.to_string(); });
  EXPECT_TRUE(filler.wait_filled(kPiece, {}).has_value());
}

class NumaNodesTest : public testing::Test {
 protected:
  void add(const std::string& name, const char* vendor, const char* kind, const char* node) {
    const auto dir = temp_.path() / name;
    std::filesystem::create_directory(dir);
    std::ofstream(dir / "vendor") << vendor << '\n';
    std::ofstream(dir / "class") << kind << '\n';
    std::ofstream(dir / "numa_node") << node << '\n';
  }
  const test::ShortTempDir temp_;
};

TEST_F(NumaNodesTest, GpusAreFoundAndNothingElse) {
  add("0000:00:01.0", "0x8086", "0x030000", "5");  // another vendor's display
  add("0000:3b:00.0", "0x10de", "0x030200", "1");
  add("0000:3b:00.1", "0x10de", "0x040300", "7");  // its sound
  add("0000:86:00.0", "0x10de", "0x030200", "0");
  add("0000:87:00.0", "0x10de", "0x030000", "1");
  add("0000:90:00.0", "0x10de", "0x030200", "-1");  // does not tell
  add("0000:91:00.0", "0x10de", "0x030200", "many");
  EXPECT_THAT(gpu_numa_nodes_of(temp_.path()), ElementsAre(0, 1));
  EXPECT_THAT(gpu_numa_nodes_of(temp_.path() / "missing"), IsEmpty());
}

TEST_F(NumaNodesTest, NodeOfOneDeviceIsTheOneThatItTells) {
  add("0000:3b:00.0", "0x10de", "0x030200", "1");
  add("0000:90:00.0", "0x10de", "0x030200", "-1");
  EXPECT_THAT(numa_nodes_of(temp_.path(), "0000:3b:00.0"), ElementsAre(1));
  EXPECT_THAT(numa_nodes_of(temp_.path(), "0000:90:00.0"), IsEmpty());
  EXPECT_THAT(numa_nodes_of(temp_.path(), "0000:3c:00.0"), IsEmpty());
}

TEST_F(NumaNodesTest, NodesThatThereAreNotAreRefusedByName) {
  EXPECT_THAT(parse_numa_nodes("0").value(), ElementsAre(0));
  EXPECT_THAT(parse_numa_nodes("0,0").value(), ElementsAre(0));
  for (const char* wrong : {"x", "0,999", "-1", "0,,1", "1048576"}) {
    const auto nodes = parse_numa_nodes(wrong);
    ASSERT_FALSE(nodes.has_value()) << wrong;
    EXPECT_EQ(nodes.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(nodes.error().message, HasSubstr("none of this machine"));
  }
}

}  // namespace
}  // namespace kvferry::ipc
