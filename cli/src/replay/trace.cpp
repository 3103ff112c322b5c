// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/trace.hpp"

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>

namespace kvferry::cli {
namespace {

using ipc::Result;
using Json = nlohmann::json;

constexpr std::size_t kMaxLineBytes = 4UL << 20;
constexpr std::size_t kMaxBlocksPerRequest = 1UL << 16;
constexpr double kDayMs = 24 * 3600e3;
/// A hundred years: a clock of nanoseconds counts 292.
constexpr double kLongestPlayMs = 36'525 * kDayMs;

/// A value in a complaint. Not what is inside of one: dump() recurses as deep as a line goes.
std::string shown(const Json& value) {
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return value.dump();
}

// Each of these says what is wrong with the field, or nothing; the value is set when all is well.

std::optional<std::string> read_ids(const Json& object, std::vector<std::uint64_t>& ids) {
  const auto found = object.find("hash_ids");
  if (found == object.end()) return "\"hash_ids\" is missing";
  if (!found->is_array()) return "\"hash_ids\" is not a list";
  if (found->empty()) return "\"hash_ids\" is empty";
  if (found->size() > kMaxBlocksPerRequest) {
    return fmt::format("\"hash_ids\" has {} entries, more than {}", found->size(),
                       kMaxBlocksPerRequest);
  }
  ids.reserve(found->size());
  for (const Json& id : *found) {
    if (!id.is_number_unsigned()) {
      return fmt::format("\"hash_ids\"[{}] is {}, not a whole number of at least 0", ids.size(),
                         shown(id));
    }
    ids.push_back(id.get<std::uint64_t>());
  }
  return std::nullopt;
}

/// Milliseconds, and parts of them: some traces count in seconds, with a fraction.
std::optional<std::string> read_time(const Json& object, double& value) {
  constexpr double kMaxTime = 1ULL << 53;
  const auto found = object.find("timestamp");
  if (found == object.end()) return "\"timestamp\" is missing";
  if (found->is_number()) value = found->get<double>();
  if (!found->is_number() || !(value >= 0)) {
    return fmt::format("\"timestamp\" is {}, not a number of at least 0", shown(*found));
  }
  if (value > kMaxTime) {
    return fmt::format("\"timestamp\" is {}, more than {}", shown(*found), kMaxTime);
  }
  return std::nullopt;
}

std::optional<std::string> read_length(const Json& object,
                                       const char* field,
                                       std::uint32_t& value) {
  const auto found = object.find(field);
  if (found == object.end()) return fmt::format("\"{}\" is missing", field);
  if (!found->is_number_unsigned()) {
    return fmt::format("\"{}\" is {}, not a whole number of at least 0", field, shown(*found));
  }
  const auto number = found->get<std::uint64_t>();
  constexpr std::uint64_t kMaxTokens = std::numeric_limits<std::uint32_t>::max();
  if (number > kMaxTokens) {
    return fmt::format("\"{}\" is {}, more than {}", field, number, kMaxTokens);
  }
  value = static_cast<std::uint32_t>(number);
  return std::nullopt;
}

std::optional<std::string> read_line(std::string_view line,
                                     bool ids_suffice,
                                     TraceRequest& request) {
  Json object;
  try {
    object = Json::parse(line);
  } catch (const Json::parse_error& error) {
    return fmt::format("not JSON (at byte {})", error.byte);
  } catch (const Json::exception&) {
    return "not JSON that can be read: it has a number beyond all limits";
  }
  if (!object.is_object()) return "not a JSON object";
  const auto wanted = [&](const char* field) { return !ids_suffice || object.contains(field); };
  if (wanted("timestamp")) {
    if (auto wrong = read_time(object, request.timestamp_ms)) return wrong;
  }
  if (wanted("input_length")) {
    if (auto wrong = read_length(object, "input_length", request.input_length)) return wrong;
  }
  if (wanted("output_length")) {
    if (auto wrong = read_length(object, "output_length", request.output_length)) return wrong;
  }
  return read_ids(object, request.hash_ids);
}

}  // namespace

Result<Trace> read_trace(const std::filesystem::path& path, const TraceOptions& options) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path)) {
    if (errno == 0) errno = EISDIR;
    return KVFERRY_ERRNO("trace {} cannot be opened", path.string());
  }
  return read_trace(in, path.string(), options);
}

Result<Trace> read_trace(std::istream& in, std::string_view name, const TraceOptions& options) {
  Trace trace;
  // NOLINTNEXTLINE(modernize-avoid-c-arrays): a vector would fill what few lines need.
  const auto buffer = std::make_unique_for_overwrite<char[]>(kMaxLineBytes);
  std::uint64_t line_number = 0;
  while (options.max_requests == 0 || trace.requests.size() < options.max_requests) {
    in.getline(buffer.get(), static_cast<std::streamsize>(kMaxLineBytes));
    const auto extracted = static_cast<std::size_t>(in.gcount());
    if (extracted == 0 && !in) break;
    ++line_number;
    TraceRequest request;
    std::optional<std::string> wrong;
    if (in.fail() && !in.eof()) {
      wrong = fmt::format("longer than {} bytes", kMaxLineBytes);
      in.clear();
      in.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
    } else {
      // gcount() counts the line's end, which is missing on a last line without one.
      std::string_view line(buffer.get(), in.eof() ? extracted : extracted - 1);
      if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
      if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
      wrong = read_line(line, options.ids_suffice, request);
    }
    if (!wrong) {
      trace.requests.push_back(std::move(request));
    } else if (options.skip_bad) {
      ++trace.skipped_lines;
    } else {
      return KVFERRY_ERROR(kInvalidArgument,
                           "{}:{}: {}; mend the line, or pass --skip-bad to go on without it", name,
                           line_number, *wrong);
    }
  }
  if (in.bad()) {
    return KVFERRY_ERROR(kSystem, "{} could not be read to its end (line {})", name, line_number);
  }
  if (trace.requests.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "{} holds no request ({} lines, {} of them skipped)",
                         name, line_number, trace.skipped_lines);
  }
  return trace;
}

std::uint32_t whole_blocks_of(const TraceRequest& request) {
  const auto length = static_cast<std::uint32_t>(request.hash_ids.size());
  return request.input_length / kTraceBlockTokens >= length ? length : length - 1;
}

ipc::Status check_pace(const std::vector<TraceRequest>& requests, double speed) {
  if (speed <= 0) return ipc::ok();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const double ms = requests[i].timestamp_ms - requests[0].timestamp_ms;
    if (ms / speed <= kLongestPlayMs) continue;
    return KVFERRY_ERROR(
        kInvalidArgument,
        "request {} has the timestamp {} ms, the first one {}: at --speed {} it is due after "
        "{:.3g} days, more than {:.0f}; mend its timestamp, or play at a higher --speed, or at max",
        i + 1, requests[i].timestamp_ms, requests[0].timestamp_ms, speed, ms / speed / kDayMs,
        kLongestPlayMs / kDayMs);
  }
  return ipc::ok();
}

TraceFacts count_trace(const std::vector<TraceRequest>& requests) {
  TraceFacts facts;
  std::unordered_set<ipc::Digest> distinct;
  for (const TraceRequest& request : requests) {
    facts.block_references += request.hash_ids.size();
    const std::uint64_t blocks =
        request.hash_ids.size() + request.output_length / kTraceBlockTokens;
    facts.longest_request_blocks =
        std::max(facts.longest_request_blocks,
                 static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, UINT32_MAX)));
    ipc::Digest hash;
    for (const std::uint64_t id : request.hash_ids) {
      hash = ipc::chain_block_hash(hash, &id, sizeof(id));
      distinct.insert(hash);
    }
  }
  facts.distinct_blocks = distinct.size();
  return facts;
}

}  // namespace kvferry::cli
