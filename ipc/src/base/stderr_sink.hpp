// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/bounded_write.hpp"

#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>

namespace kvferry::ipc {

/// Log lines to stderr, which may be a pipe that nobody reads: the threads that log have peers that
/// wait for them, so lines are dropped, and counted, rather than waited for.
/// @threading any.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StderrSink(int fd = STDERR_FILENO, Duration patience = kPatience)
      : fd_(fd), patience_(patience) {}

 private:
  /// For a reader that is only slow. One that has stopped is given nothing more, until it goes on.
  static constexpr auto kPatience = std::chrono::seconds(1);

  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    if (dropped_ > 0) {
      fmt::format_to(std::back_inserter(line), "{} log lines were dropped: nobody read stderr\n",
                     dropped_);
    }
    formatter_->format(message, line);
    const Duration patience = dropped_ > 0 ? Duration::zero() : patience_;
    const int error = write_bounded(fd_, {line.data(), line.size()}, patience);
    dropped_ = error == EAGAIN ? dropped_ + 1 : 0;
  }
  void flush_() override {}

  const int fd_;
  const Duration patience_;
  std::uint64_t dropped_ = 0;
};

}  // namespace kvferry::ipc
