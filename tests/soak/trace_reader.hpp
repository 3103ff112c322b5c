// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "soak/trace_watch.hpp"

#include <filesystem>
#include <string>

namespace kvferry::soak {

/// A TraceWatch in a process of its own: it reads megabytes of records each time, and what that
/// does to a heap would be taken for the engine's, whose process starts it. @threading one thread.
class TraceReader {
 public:
  /// Starts this very program again. Throws Exception.
  TraceReader(const std::filesystem::path& runtime_dir,
              const std::string& instance,
              const std::filesystem::path& log);
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;
  ~TraceReader();

  /// Has all records checked and takes the counts over.
  [[nodiscard]] ipc::Status check(ipc::Deadline deadline);
  [[nodiscard]] const TraceCounts& counts() const noexcept { return counts_; }

 private:
  ipc::UniqueFd socket_;
  ipc::ProcessRef process_;
  TraceCounts counts_;
};

/// What the process does that a TraceReader starts: a check for each packet, until the other end
/// closes.
int serve_trace_reader(const std::string& runtime_dir, const std::string& instance);

/// The option that makes the program do so; the instance is an argument of its own.
inline constexpr const char* kServeTraceReader = "--serve-trace-reader";

}  // namespace kvferry::soak
