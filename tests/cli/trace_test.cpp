// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/trace.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using ipc::ErrorCode;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::string_view kGood =
    R"({"timestamp": 3000, "input_length": 1000, "output_length": 7, "hash_ids": [0, 5]})";

ipc::Result<Trace> read(const std::string& text, const TraceOptions& options = {}) {
  std::istringstream in(text);
  return read_trace(in, "t.jsonl", options);
}

TEST(TraceTest, ReadsEveryField) {
  const auto trace = read(std::string(kGood) + "\n");
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->requests.size(), 1U);
  const TraceRequest& request = trace->requests[0];
  EXPECT_EQ(request.timestamp_ms, 3000.0);
  EXPECT_EQ(request.input_length, 1000U);
  EXPECT_EQ(request.output_length, 7U);
  EXPECT_THAT(request.hash_ids, ElementsAre(0U, 5U));
}

TEST(TraceTest, TakesTimesWithFractionsAndFieldsThatItDoesNotKnow) {
  const auto line = [](const std::string& time) {
    return R"({"chat_id": 159, "parent_chat_id": -1, "timestamp": )" + time +
           R"(, "input_length": 2, "output_length": 1, "type": "text", "turn": 1, "more": [{}],)"
           R"( "hash_ids": [0]})" +
           "\n";
  };
  const auto trace = read(line("61.114") + line("0.5") + line("0") + line("-0.0") + line("1e3") +
                          line("9007199254740992"));
  ASSERT_TRUE(trace) << trace.error().message;
  std::vector<double> times;
  for (const TraceRequest& request : trace->requests) times.push_back(request.timestamp_ms);
  EXPECT_THAT(times, ElementsAre(61.114, 0.5, 0, 0, 1000, 0x1p53));
}

TEST(TraceTest, NeedsIdsAloneWhereTheySuffice) {
  const TraceOptions options{.ids_suffice = true};
  const auto trace = read(std::string(kGood) + "\n" + R"({"hash_ids": [7]})" + "\n", options);
  ASSERT_TRUE(trace) << trace.error().message;
  ASSERT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->requests[0].timestamp_ms, 3000.0);
  EXPECT_EQ(trace->requests[1].timestamp_ms, 0.0);
  EXPECT_EQ(trace->requests[1].input_length, 0U);
  EXPECT_THAT(trace->requests[1].hash_ids, ElementsAre(7U));
  for (const char* const field : {"timestamp", "input_length", "output_length"}) {
    const auto wrong = read(fmt::format(R"({{"{}": "5", "hash_ids": [7]}})", field), options);
    ASSERT_FALSE(wrong) << field;
    EXPECT_THAT(wrong.error().message, HasSubstr(fmt::format("\"{}\" is \"5\", not a", field)));
  }
  EXPECT_THAT(read(R"({"timestamp": 5})", options).error().message, HasSubstr("\"hash_ids\" is m"));
}

TEST(TraceTest, TakesBlankLinesCarriageReturnsAndAMissingLastNewline) {
  const std::string good(kGood);
  const auto trace = read(good + "\r\n\n  \n" + good);
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->skipped_lines, 0U);
}

TEST(TraceTest, StopsAtTheRequestedCount) {
  const std::string good(kGood);
  const auto trace = read(good + "\n" + good + "\nnot JSON\n", {.max_requests = 2});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->requests.size(), 2U);
}

struct BadLine {
  const char* name;
  const char* text;
  const char* complaint;
};

class TraceBadLineTest : public testing::TestWithParam<BadLine> {};

TEST_P(TraceBadLineTest, NamesFileLineAndWhatIsWrong) {
  const auto trace = read(std::string(kGood) + "\n" + GetParam().text + "\n");
  ASSERT_FALSE(trace);
  EXPECT_EQ(trace.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(trace.error().message, HasSubstr("t.jsonl:2: "));
  EXPECT_THAT(trace.error().message, HasSubstr(GetParam().complaint));
}

TEST_P(TraceBadLineTest, IsCountedWithSkipBad) {
  const std::string good(kGood);
  const auto trace = read(good + "\n" + GetParam().text + "\n" + good, {.skip_bad = true});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->skipped_lines, 1U);
}

INSTANTIATE_TEST_SUITE_P(
    Lines,
    TraceBadLineTest,
    testing::Values(
        BadLine{"Text", "hello", "not JSON"},
        BadLine{"Cut", R"({"timestamp": 3000, "input_le)", "not JSON"},
        BadLine{"List", "[1, 2]", "not a JSON object"},
        BadLine{"NoTimestamp", R"({"input_length": 1, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is missing"},
        BadLine{"NoIds", R"({"timestamp": 0, "input_length": 1, "output_length": 1})",
                "\"hash_ids\" is missing"},
        BadLine{"NoIdInside",
                R"({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []})",
                "\"hash_ids\" is empty"},
        BadLine{"Negative",
                R"({"timestamp": 0, "input_length": -4, "output_length": 1, "hash_ids": [0]})",
                "\"input_length\" is -4"},
        BadLine{"Fraction",
                R"({"timestamp": 0, "input_length": 4.5, "output_length": 1, "hash_ids": [0]})",
                "\"input_length\" is 4.5, not a whole number"},
        BadLine{"NegativeTime",
                R"({"timestamp": -0.5, "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is -0.5, not a number of at least 0"},
        BadLine{"NegativeWholeTime",
                R"({"timestamp": -5, "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is -5, not a number of at least 0"},
        BadLine{"TextAsTime",
                R"({"timestamp": "0.5", "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is \"0.5\", not a number"},
        BadLine{"NotANumberAsTime",
                R"({"timestamp": NaN, "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "not JSON"},
        BadLine{"TimeBeyondTheLimit",
                R"({"timestamp": 1e16, "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is 1e+16, more than 9007199254740992"},
        BadLine{"TooLarge",
                R"({"timestamp": 0, "input_length": 4294967296, "output_length": 1,)"
                R"( "hash_ids": [0]})",
                "\"input_length\" is 4294967296, more than"},
        BadLine{"BeyondAllNumbers", R"({"timestamp": 1e999})", "number beyond all limits"},
        BadLine{"ListAsTime",
                R"({"timestamp": [[1]], "input_length": 4, "output_length": 1, "hash_ids": [0]})",
                "\"timestamp\" is a list"},
        BadLine{"NegativeId",
                R"({"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0, -1]})",
                "\"hash_ids\"[1] is -1"},
        BadLine{"IdsNotAList",
                R"({"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": 3})",
                "\"hash_ids\" is not a list"}),
    [](const auto& line) { return std::string(line.param.name); });

TEST(TraceTest, SkipsALineBeyondTheLimitAndGoesOnBehindIt) {
  const std::string good(kGood);
  const auto trace =
      read(good + "\n" + std::string(5UL << 20, 'x') + "\n" + good + "\n", {.skip_bad = true});
  ASSERT_TRUE(trace) << trace.error().message;
  EXPECT_EQ(trace->requests.size(), 2U);
  EXPECT_EQ(trace->skipped_lines, 1U);
}

TEST(TraceTest, ComplainsOfAValueHoweverDeepItIsNested) {
  constexpr std::size_t kDeep = 1'000'000;
  const std::string value = std::string(kDeep, '[') + std::string(kDeep, ']');
  const auto trace = read(R"({"timestamp": )" + value + "}\n");
  ASSERT_FALSE(trace);
  EXPECT_THAT(trace.error().message, HasSubstr("\"timestamp\" is a list"));
}

TEST(TraceTest, RefusesAnEmptyTrace) {
  EXPECT_FALSE(read(""));
  EXPECT_FALSE(read("x\n", {.skip_bad = true}));
}

TEST(TraceTest, NamesAFileThatIsNotThere) {
  const auto trace = read_trace(std::filesystem::path("/nonexistent/trace.jsonl"), {});
  ASSERT_FALSE(trace);
  EXPECT_EQ(trace.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(trace.error().message, HasSubstr("/nonexistent/trace.jsonl"));
}

TEST(TraceTest, ARequestThatNoClockReachesIsRefusedWithWhatMakesItSoLate) {
  constexpr double kLatest = 1ULL << 53;  // that a timestamp may be
  const auto late = [](double timestamp, double speed) {
    return check_pace({{5, 512, 0, {1}}, {7, 512, 0, {1}}, {timestamp, 512, 0, {1}}}, speed);
  };
  EXPECT_TRUE(late(kLatest, 0)) << "as fast as it goes: time is nothing to it";
  EXPECT_TRUE(late(3e12, 1)) << "95 years";
  EXPECT_TRUE(late(0, 0.001)) << "before the first one";
  const ipc::Status refused = late(kLatest, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().message,
              AllOf(HasSubstr("request 3 has the timestamp 9007199254740992 ms"),
                    HasSubstr("the first one 5"), HasSubstr("at --speed 1 it is due after"),
                    HasSubstr("mend its timestamp, or play at a higher --speed, or at max")));
  EXPECT_TRUE(late(1e12, 1));
  EXPECT_FALSE(late(1e12, 0.001)) << "a slow pace makes it as late";
  // What began with a large number is not late.
  EXPECT_TRUE(check_pace({{kLatest - 1, 512, 0, {1}}, {kLatest, 512, 0, {1}}}, 0.001));
  EXPECT_TRUE(check_pace({}, 1));
}

TEST(TraceTest, CountsBlocksByTheirWholePrefix) {
  TraceRequest a{0, 1024, 600, {1, 2}};
  TraceRequest b{0, 1024, 0, {1, 2}};
  TraceRequest c{0, 1536, 0, {3, 2, 1}};  // The same ids behind another prefix are other blocks.
  const TraceFacts facts = count_trace({a, b, c});
  EXPECT_EQ(facts.block_references, 7U);
  EXPECT_EQ(facts.distinct_blocks, 5U);
  EXPECT_EQ(facts.longest_request_blocks, 3U);
}

}  // namespace
}  // namespace kvferry::cli
