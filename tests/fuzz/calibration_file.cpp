// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A kept calibration. One that is accepted can be used: it is written and read back as the same,
// and every job gets a choice from it or none.
#include "kvferry/cache_manager/calibration_file.hpp"

#include "fuzz.hpp"
#include "kvferry/cache_manager/strategy_choice.hpp"

#include <cmath>
#include <vector>

namespace kvferry::fuzz {
namespace {

using namespace cache_manager;

void choose(const Calibration& calibration) {
  for (const auto direction :
       {ipc::CopyDirection::kDeviceToHost, ipc::CopyDirection::kHostToDevice}) {
    for (const std::uint32_t count : {0U, 1U, 3U, 1000U, ~0U}) {
      const std::vector<std::uint32_t> blocks(calibration.of(direction).size(), count);
      for (const bool alone : {true, false}) {
        const JobShape job{direction, blocks, alone, {8ULL << 20, 8}};
        for (const CopyStrategy strategy : kMeasuredStrategies) {
          const auto us = estimate_us(calibration, strategy, job, {});
          KVFERRY_CHECK(!us || (std::isfinite(*us) && *us > 0), "a time that is none");
        }
        (void)choose_calibrated(calibration, kMeasuredStrategies, job, {});
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const auto calibration = cache_manager::parse_calibration(input.text());
  if (!calibration) {
    KVFERRY_CHECK(!calibration.error().message.empty(), "an error without words");
    return 0;
  }
  const auto again = cache_manager::parse_calibration(cache_manager::to_text(*calibration));
  KVFERRY_CHECK(again.has_value(), again ? "" : again.error().to_string());
  KVFERRY_CHECK(*again == *calibration, "another calibration after a round trip");
  fuzz::choose(*calibration);
  return 0;
}
