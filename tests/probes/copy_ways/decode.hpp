// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/cuda_handles.hpp"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>
#include <vector>

namespace kvferry::probes {

/// What a decode is to those beside it: a recorded graph of 128 kernels for each token, which
/// together read 4 GiB of device memory and fill every multiprocessor. A thread of its own launches
/// one token after another and takes their times. It does so only while it is resumed.
/// @threading one at a time.
class Decode {
 public:
  Decode();
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;
  ~Decode();

  /// @throws what a token failed with.
  void resume();
  /// Returns when no token is under way.
  void pause();

  void begin_sample();
  /// Microseconds of each token that began and ended since begin_sample. @throws what one failed
  /// with.
  std::vector<double> end_sample();

  /// What its thread has taken of a processor, which it needs all of while it is resumed.
  std::chrono::nanoseconds processor_time() const;

 private:
  void record_graph();
  void generate(const std::stop_token& stop);
  double run_token();
  void rethrow_failure() const;

  DeviceMemory weights_;
  DeviceMemory sink_;
  Stream stream_ = make_stream();
  Event token_over_ = make_event();
  GraphExec graph_;

  std::mutex mutex_;  // guards all down to the thread
  std::condition_variable_any changed_;
  bool wanted_ = false;
  bool token_under_way_ = false;
  bool sampling_ = false;
  std::vector<double> sample_us_;
  std::exception_ptr failure_;
  std::jthread thread_;  // declared last: it uses all of the above
};

/// Keeps a decode going for a scope.
class DecodeRuns {
 public:
  explicit DecodeRuns(Decode& decode) : decode_(decode) { decode_.resume(); }
  DecodeRuns(const DecodeRuns&) = delete;
  DecodeRuns& operator=(const DecodeRuns&) = delete;
  ~DecodeRuns() { decode_.pause(); }

 private:
  Decode& decode_;
};

}  // namespace kvferry::probes
