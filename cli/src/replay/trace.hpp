// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <filesystem>
#include <istream>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Tokens behind one hash id of a trace.
inline constexpr std::uint32_t kTraceBlockTokens = 512;

/// One request of a trace. Equal ids in equal positions, after equal prefixes, are a reusable
/// prefix.
struct TraceRequest {
  double timestamp_ms = 0;
  std::uint32_t input_length = 0;   ///< Tokens.
  std::uint32_t output_length = 0;  ///< Tokens.
  std::vector<std::uint64_t> hash_ids;
};
/// Blocks of the prompt that are full of tokens: the last one may not be, and its id then stands
/// for contents that no other request shares.
[[nodiscard]] std::uint32_t whole_blocks_of(const TraceRequest& request);

struct Trace {
  std::vector<TraceRequest> requests;
  std::uint64_t skipped_lines = 0;
};

struct TraceOptions {
  std::uint64_t max_requests = 0;  ///< 0: all.
  bool skip_bad = false;           ///< Count malformed lines instead of failing.
  bool ids_suffice = false;        ///< Times and lengths may be missing, and are 0 then.
};

/// Reads JSON lines {"timestamp", "input_length", "output_length", "hash_ids"}; other fields may be
/// there, too. A malformed line is kInvalidArgument with file, line number and what is wrong with
/// it; kNotFound without the file.
[[nodiscard]] ipc::Result<Trace> read_trace(const std::filesystem::path& path,
                                            const TraceOptions& options);
/// The same from a stream; name is what messages call it.
[[nodiscard]] ipc::Result<Trace> read_trace(std::istream& in,
                                            std::string_view name,
                                            const TraceOptions& options);

/// Whether a replay that goes so many times as fast as its trace ends within what a clock counts;
/// kInvalidArgument with the request that does not. speed 0: as fast as it goes.
[[nodiscard]] ipc::Status check_pace(const std::vector<TraceRequest>& requests, double speed);

/// What a run will meet: counted once, for sizing and for reports.
struct TraceFacts {
  std::uint64_t block_references = 0;
  std::uint64_t distinct_blocks = 0;
  std::uint32_t longest_request_blocks = 0;  ///< Input and output blocks of one request.
};
[[nodiscard]] TraceFacts count_trace(const std::vector<TraceRequest>& requests);

}  // namespace kvferry::cli
