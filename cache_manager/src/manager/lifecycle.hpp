// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/clear_operations.hpp"
#include "manager/context.hpp"
#include "manager/reinit_operations.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// What a rank may take beyond a clear's deadline: to end a mover, which has the whole pool pinned,
/// and to prove that its memory is back.
[[nodiscard]] std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes);

/// Clear and re-init, as operators and engines ask for them: checks what is asked, finds the
/// engines that it is for and starts it. One operation per engine at a time.
/// @threading the loop's thread.
class Lifecycle {
 public:
  explicit Lifecycle(ManagerContext& context)
      : context_(context),
        clears_(context, clear_margin(context.pool.stats().bytes)),
        reinits_(context, clear_margin(context.pool.stats().bytes)) {}
  Lifecycle(const Lifecycle&) = delete;
  Lifecycle& operator=(const Lifecycle&) = delete;
  ~Lifecycle() = default;

  void clear(const ipc::Peer& peer, const ipc::Envelope& request);
  void reinit(const ipc::Peer& peer, const ipc::Envelope& request);
  /// A re-init that has all answers waits for the ranks' state reports.
  void on_engine_changed(const EngineRecord& engine) { reinits_.on_engine_changed(engine); }
  /// Answers the operations that run: the manager ends.
  void cancel_all();

 private:
  /// find_scope, and none of its engines runs an operation.
  [[nodiscard]] ipc::Result<ClearScope> idle_scope(const ipc::Peer& peer, const std::string& name);

  ManagerContext& context_;
  ClearOperations clears_;
  ReinitOperations reinits_;
};

}  // namespace kvferry::cache_manager
