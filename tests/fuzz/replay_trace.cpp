// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A trace of requests, one JSON object a line.
#include "fuzz.hpp"
#include "replay/trace.hpp"

#include <sstream>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  cli::TraceOptions options;
  const std::uint8_t how = input.byte();
  options.skip_bad = how % 2 == 1;
  options.ids_suffice = how / 2 % 2 == 1;
  std::istringstream stream{std::string(input.text())};
  const auto trace = cli::read_trace(stream, "fuzz", options);
  if (!trace) return 0;
  KVFERRY_CHECK(!trace->requests.empty(), "a trace without requests");
  for (const cli::TraceRequest& request : trace->requests) {
    // Of not-a-number neither would be true.
    KVFERRY_CHECK(request.timestamp_ms >= 0 && request.timestamp_ms <= 0x1p53, "no time");
  }
  const cli::TraceFacts facts = cli::count_trace(trace->requests);
  KVFERRY_CHECK(facts.distinct_blocks <= facts.block_references,
                "more kinds of blocks than blocks");
  return 0;
}
