// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/index/prefix_table.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

BlockKey key(std::uint64_t i) {
  return {Digest::from_words(1, 2), Digest::hash(&i, sizeof(i)), GroupId{0}};
}

// Blocks come and go around those that stay, rows move up over them, and the table grows: what is
// there all the time is found every time, as it is, and what never was is not.
TEST(PrefixTableReadersTest, WhatStaysIsFoundWhileEntriesMoveAndTheTableGrows) {
  constexpr std::uint64_t kStay = 800;
  constexpr std::uint64_t kCome = 1'900;  // with those that stay as many as the first slots take
  constexpr std::uint64_t kNever = 1'000'000;
  PrefixTable table(200'000);
  for (std::uint64_t i = 0; i < kStay; ++i) {
    table.put(key(i), {false, static_cast<std::uint32_t>(i + 1)});
  }
  std::atomic<bool> over = false;
  std::atomic<std::uint64_t> wrong = 0;
  std::atomic<std::uint64_t> looks = 0;
  std::vector<std::thread> readers;
  for (std::uint64_t seed = 1; seed <= 2; ++seed) {
    readers.emplace_back([&, seed] {
      const auto view = PrefixTableView::map(table.fd(), table.size_bytes());
      if (!view) {
        ++wrong;
        return;
      }
      std::mt19937_64 random(seed);
      while (!over) {
        const std::uint64_t i = random() % kStay;
        const auto found = view->find(key(i));
        if (!found || found->pending || found->run != i + 1) ++wrong;
        if (view->find(key(kNever + i))) ++wrong;
        ++looks;
      }
    });
  }
  std::mt19937_64 random(9);
  for (int step = 0; step < 400'000 || (looks < 20'000 && wrong == 0); ++step) {
    const std::uint64_t i = kStay + random() % kCome;
    if (random() % 2 == 0) {
      table.put(key(i), {random() % 2 == 0, 1});
    } else {
      table.erase(key(i));
    }
    if (step == 300'000) {
      for (std::uint64_t more = 0; more < 50'000; ++more) table.put(key(10'000 + more), {false, 1});
    }
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0U) << "of " << looks << " looks";
}

}  // namespace
}  // namespace kvferry::ipc
