// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/way.hpp"

namespace kvferry::probes {

/// Lets each lane make one call, and compares every byte that this should have copied with a
/// pattern that no two places share. Overwrites what the call reads and writes.
/// @throws std::runtime_error with the first byte that differs.
void check_contents(const std::vector<Lane>& lanes, Direction direction);

}  // namespace kvferry::probes
