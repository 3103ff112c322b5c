// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_end.hpp"

#include <gtest/gtest.h>

namespace kvferry::worker {
namespace {

using ipc::ErrorCode;

std::uint8_t code(ErrorCode error) { return static_cast<std::uint8_t>(error); }

TEST(StoreEndTest, SaysOfEachUnitWhatBecameOfIt) {
  const std::uint8_t there = code(ErrorCode::kAlreadyExists);
  const std::uint8_t full = code(ErrorCode::kNoHostMemory);
  const std::uint8_t used = code(ErrorCode::kNotIdle);
  const Completion done{.job = {},
                        .results = {0, 0, there, there, full, used, code(ErrorCode::kBusy)},
                        .message = {}};
  EXPECT_EQ(end_of_store(done, 0, 2), StoreEnd::kStored);
  EXPECT_EQ(end_of_store(done, 2, 2), StoreEnd::kThere);
  EXPECT_EQ(end_of_store(done, 4, 1), StoreEnd::kNoRoom);
  EXPECT_EQ(end_of_store(done, 5, 1), StoreEnd::kInUse);
  EXPECT_EQ(end_of_store(done, 6, 1), StoreEnd::kFailed);
}

TEST(StoreEndTest, UnitIsStoredAsAWholeOrNotAtAll) {
  Completion done{.job = {}, .results = {0, code(ErrorCode::kCancelled)}, .message = {}};
  EXPECT_EQ(end_of_store(done, 0, 2), StoreEnd::kFailed);
  done.results = {code(ErrorCode::kNoHostMemory), code(ErrorCode::kAlreadyExists)};
  EXPECT_EQ(end_of_store(done, 0, 2), StoreEnd::kFailed);
  EXPECT_EQ(end_of_store(done, 1, 2), StoreEnd::kFailed) << "results that did not come";
}

}  // namespace
}  // namespace kvferry::worker
