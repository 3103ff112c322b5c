// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_operations.hpp"
#include "device/host_work.hpp"
#include "kvferry/ipc/os/own_thread.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace kvferry::ipc {

/// An ordered thread with a bounded queue. A caller that finds the queue full waits for room, as
/// with a GPU.
class HostStream final : public HostOperations {
 public:
  explicit HostStream(std::string device_name);
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  ~HostStream() override;

  [[nodiscard]] Result<std::unique_ptr<RecordedWork>> record(
      const std::function<Status(Stream&)>& body) override;
  [[nodiscard]] Status launch(const RecordedWork& work) override;
  [[nodiscard]] Status notify(int event_fd) override;
  [[nodiscard]] Result<bool> query() override;
  /// Work that no call of Stream makes.
  [[nodiscard]] Status enqueue(host_work::Item item) { return take(std::move(item)); }

 private:
  [[nodiscard]] Status take(host_work::Item item) override;
  void run();

  std::mutex mutex_;  ///< Guards the three below.
  std::deque<host_work::Item> queue_;
  bool running_ = false;  ///< The thread works on an item that it has taken.
  bool stopping_ = false;
  std::atomic<bool> gives_up_ = false;  ///< No word is waited for any more.
  std::condition_variable has_work_;
  std::condition_variable has_room_;  ///< Also: everything is done.
  std::optional<OwnThread> thread_;
};

}  // namespace kvferry::ipc
