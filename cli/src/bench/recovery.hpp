// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_target.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/worker/client.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// Kills what copies while these jobs go to the host in turns, so many at a time. Microseconds from
/// the kill until a job that was submitted after the death has completed well. Jobs that the death
/// met are submitted again, as soon as jobs are accepted. @pre nothing is under way.
[[nodiscard]] ipc::Result<double> measure_recovery(
    BenchTarget& target,
    const std::vector<std::vector<worker::SequenceItem>>& jobs,
    std::uint32_t in_flight);

}  // namespace kvferry::cli
