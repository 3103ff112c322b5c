// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/blocks.hpp"

#include <cstdint>
#include <regex>
#include <string>
#include <vector>

namespace kvferry::probes {

struct Options {
  std::regex ways;
  std::vector<std::uint32_t> chunk_bytes;
  std::vector<Direction> directions;
  std::vector<std::size_t> arena_bytes;
  double seconds = 0;
  double pace_gbps = 0;
  bool json = false;
};

/// Parses the command line. Ends the process after --help, and with 2 when something is wrong.
Options parse_options(int argc, char** argv);

}  // namespace kvferry::probes
