// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/verifier.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

const ipc::Digest kOld = ipc::Digest::from_words(1, 1);
const ipc::Digest kNew = ipc::Digest::from_words(2, 2);

class VerifierTest : public testing::Test {
 protected:
  VerifierTest() {
    for (std::uint32_t i = 0; i < 20; ++i) prompts_.push_back({{1, 2, 3}, 3});
  }

  static ipc::GenerateReply answer(std::vector<std::uint32_t> tokens, const ipc::Digest& weights) {
    ipc::GenerateReply reply;
    reply.tokens = std::move(tokens);
    reply.weights_first = weights;
    reply.weights_last = weights;
    reply.admissions = 1;
    return reply;
  }
  void take(std::size_t prompt, const ipc::GenerateReply& reply) {
    verifier_.take(prompt, reply, iteration_);
  }

  std::vector<ipc::Generate> prompts_;
  std::vector<std::string> said_;
  AnswerCounts iteration_;
  Verifier verifier_{prompts_, [this](const std::string& line) { said_.push_back(line); }};
};

TEST_F(VerifierTest, TheSamePromptUnderTheSameWeightsIsVerified) {
  take(0, answer({5, 6, 7}, kOld));
  EXPECT_EQ(verifier_.counts().verified, 0U) << "there was nothing to compare with";
  take(0, answer({5, 6, 7}, kOld));
  take(0, answer({7, 6, 5}, kNew));
  take(1, answer({1, 1, 1}, kOld));
  take(0, answer({5, 6, 7}, kOld));
  EXPECT_EQ(verifier_.counts().verified, 2U);
  EXPECT_EQ(verifier_.counts().corrupt, 0U);
  EXPECT_EQ(verifier_.counts().finished, 5U);
  EXPECT_EQ(iteration_.verified, 2U);
  EXPECT_THAT(said_, IsEmpty());
}

TEST_F(VerifierTest, AnotherAnswerIsCorruptAndNamed) {
  take(4, answer({5, 6, 7}, kOld));
  auto wrong = answer({5, 9, 7}, kOld);
  wrong.admissions = 2;
  wrong.cached_tokens = 2;
  take(4, wrong);
  EXPECT_EQ(verifier_.counts().corrupt, 1U);
  EXPECT_EQ(verifier_.counts().verified, 0U);
  EXPECT_EQ(iteration_.corrupt, 1U);
  ASSERT_THAT(said_, SizeIs(1));
  EXPECT_THAT(said_[0], AllOf(HasSubstr("prompt 4"), HasSubstr(kOld.hex()),
                              HasSubstr("token 1 of 3 is 9, first it was 6"),
                              HasSubstr("admitted 2 times"), HasSubstr("2 of 3 prompt tokens")));
}

TEST_F(VerifierTest, AnAnswerOfAnotherLengthIsCorrupt) {
  take(0, answer({5, 6}, kOld));
  auto mixed = answer({1, 2, 3, 4}, kOld);
  mixed.weights_last = kNew;
  take(1, mixed);
  EXPECT_EQ(verifier_.counts().corrupt, 2U);
  ASSERT_THAT(said_, SizeIs(2));
  EXPECT_THAT(said_[0], HasSubstr("2 tokens, 3 were asked for"));
  take(0, answer({5, 6, 7}, kOld));
  take(0, answer({5, 6, 7}, kOld));
  EXPECT_EQ(verifier_.counts().verified, 1U) << "the short one is nothing to compare with";
}

TEST_F(VerifierTest, OnlyTheFirstFiveAreNamed) {
  for (std::size_t prompt = 0; prompt < 20; ++prompt) take(prompt, answer({1}, kOld));
  EXPECT_EQ(verifier_.counts().corrupt, 20U);
  EXPECT_THAT(said_, SizeIs(5));
}

TEST_F(VerifierTest, AbortedOnesAndThoseOfSeveralWeightsAreCountedApart) {
  take(0, answer({5, 6, 7}, kOld));
  auto aborted = answer({9}, kOld);
  aborted.end = ipc::GenerateEnd::kAborted;
  take(0, aborted);
  auto mixed = answer({5, 9, 9}, kOld);
  mixed.weights_last = kNew;
  mixed.admissions = 3;
  take(0, mixed);
  EXPECT_EQ(verifier_.counts().aborted, 1U);
  EXPECT_EQ(verifier_.counts().mixed, 1U);
  EXPECT_EQ(verifier_.counts().finished, 2U);
  EXPECT_EQ(verifier_.counts().retracted, 2U);
  EXPECT_EQ(verifier_.counts().verified, 0U);
  EXPECT_EQ(verifier_.counts().corrupt, 0U);
}

TEST_F(VerifierTest, TellsWhetherWeightsMakeADifference) {
  take(0, answer({5, 6, 7}, kOld));
  take(1, answer({5, 6, 7}, kOld));
  EXPECT_EQ(verifier_.compared_prompts(), 0U);
  take(0, answer({5, 6, 7}, kNew));
  EXPECT_EQ(verifier_.compared_prompts(), 1U);
  EXPECT_EQ(verifier_.equal_prompts(), 1U);
  take(1, answer({8, 6, 7}, kNew));
  EXPECT_EQ(verifier_.compared_prompts(), 2U);
  EXPECT_EQ(verifier_.equal_prompts(), 1U);
}

}  // namespace
}  // namespace kvferry::cli
