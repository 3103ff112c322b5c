// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/component_messages.hpp"
#include "manager/context.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// Passes looks at components, and releases of them, on to the workers of all ranks. They change
/// nothing that a command of the lifecycle works on, so that they run beside any of them. Releases
/// are one at a time for each engine.
/// @threading the loop's thread.
class ComponentCalls {
 public:
  explicit ComponentCalls(ManagerContext& context) : context_(context) {}
  ComponentCalls(const ComponentCalls&) = delete;
  ComponentCalls& operator=(const ComponentCalls&) = delete;
  ~ComponentCalls() = default;

  /// Answered when every rank has answered, or is proven dead, or shortly after the deadline that
  /// the ranks are told. kBusy: a release, while another one runs on the engine.
  void ask(const ipc::Peer& peer,
           const ipc::Envelope& request,
           const ipc::ComponentsRequest& message,
           const EngineRecord& engine);
  /// Answers those that run; what the ranks have begun they finish.
  void cancel_all(const ipc::Error& why);

 private:
  struct Round {
    ipc::Peer peer;
    ipc::Envelope request;  ///< Without its body.
    std::string engine;
    bool releases = false;
    ipc::TimePoint start;
    std::size_t pending = 0;
    bool answered = false;
    ipc::ComponentsReply reply;
  };
  using RoundRef = std::shared_ptr<Round>;  // Shared by the answers that are outstanding.

  static void note(Round& round, std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer);
  void end_one(const RoundRef& round);

  ManagerContext& context_;
  std::vector<RoundRef> rounds_;
};

}  // namespace kvferry::cache_manager
