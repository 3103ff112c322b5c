// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

namespace kvferry::worker {

/// A user's line to an engine of reference workers: asks its scheduler for tokens. Looks for the
/// scheduler, and for the next one after it died, by itself.
/// @threading the loop's thread.
class GenerationChannel {
 public:
  /// kPeerDied: the scheduler died or ended before it answered. kBusy: it has all requests that it
  /// takes; retry. kInvalidArgument: the request does not fit the engine's cache.
  using Done = std::function<void(ipc::Result<ipc::GenerateReply>)>;
  /// name: what the scheduler calls this side in its log. on_up: requests are taken from now on.
  GenerationChannel(ipc::EventLoop& loop,
                    ipc::RuntimeDir dir,
                    std::string engine,
                    std::string name,
                    std::function<void()> on_up);
  GenerationChannel(const GenerationChannel&) = delete;
  GenerationChannel& operator=(const GenerationChannel&) = delete;
  ~GenerationChannel();

  [[nodiscard]] bool is_up() const noexcept { return link_ != nullptr; }
  /// done is called exactly once from the loop, unless this object ends before. An error here means
  /// that nothing was sent and done is not called: kPeerDied (no scheduler at the moment), kBusy.
  [[nodiscard]] ipc::Status submit(const ipc::Generate& request, Done done);
  /// Requests without an answer.
  [[nodiscard]] std::size_t outstanding() const noexcept { return pending_.size(); }

 private:
  void connect();
  void connect_later();
  void on_readable();
  void on_lost();

  ipc::EventLoop& loop_;
  const ipc::RuntimeDir dir_;
  const std::string engine_;
  const std::string name_;
  std::function<void()> on_up_;
  std::unique_ptr<ipc::ControlLink> link_;
  std::unordered_map<std::uint64_t, Done> pending_;
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::worker
