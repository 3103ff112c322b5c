// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/step_channel.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// Looks at the memory of every rank's worker, which changes nothing there.
/// @threading the loop's thread.
class MemoryWatch {
 public:
  /// Of each rank. An error names the ranks that did not answer.
  using Done = std::function<void(ipc::Result<std::vector<ipc::WorkerMemory>>)>;

  /// on_change: a worker was found or lost.
  MemoryWatch(ipc::EventLoop& loop,
              const ipc::RuntimeDir& dir,
              const std::string& engine,
              std::uint32_t ranks,
              const std::function<void()>& on_change);
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;
  ~MemoryWatch();

  /// Ranks whose worker is not found.
  [[nodiscard]] std::vector<std::uint32_t> missing() const;
  /// done is called once from the loop, within a few seconds, unless this object ends before.
  /// @pre no other look is under way.
  void look(Done done);

 private:
  void on_answer(std::uint64_t look, std::size_t rank, ipc::Result<ipc::WorkerMemory> answer);
  void give_up();
  void finish(ipc::Result<std::vector<ipc::WorkerMemory>> result);

  ipc::EventLoop& loop_;
  std::vector<std::unique_ptr<worker::StepChannel>> channels_;
  std::uint64_t look_ = 0;  ///< Answers to an earlier one count no more.
  std::vector<std::optional<ipc::WorkerMemory>> answers_;
  Done done_;
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::cli
