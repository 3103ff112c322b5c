// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "rl/report.hpp"
#include "rl/weights_files.hpp"

#include <cstdint>

namespace kvferry::test {

inline constexpr std::uint64_t kMiB = 1ULL << 20;

/// A loop over two ranks with nothing to complain about.
inline cli::RlReport sample_report(std::uint32_t iterations) {
  cli::RlReport report;
  report.settings.iterations = iterations;
  report.settings.geometry = "tiny";
  report.settings.device = "host";
  report.settings.ranks = 2;
  report.answers.finished = 16ULL * iterations;
  report.answers.verified = 4;
  for (std::uint32_t i = 0; i < iterations; ++i) {
    cli::IterationRecord record;
    record.number = i + 1;
    record.version = (i + 1) % cli::kWeightsVersions;
    record.weights = cli::weights_id(0, record.version);
    for (std::uint64_t rank = 0; rank < 2; ++rank) {
      record.ranks.push_back({60 * kMiB, 35 * kMiB, 40 * kMiB, 30 * kMiB, (100 + rank) * kMiB});
    }
    record.pause_ms = 1;
    record.update_ms = 20;
    record.continue_ms = 2;
    record.finished = true;
    report.iterations.push_back(record);
  }
  for (int rank = 0; rank < 2; ++rank) {
    ipc::WorkerMemory worker;
    worker.empties = {0, 0, iterations, 0, 0, 0};
    report.workers.push_back(worker);
  }
  report.emptied_continues = iterations;
  return report;
}

}  // namespace kvferry::test
