// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/context.hpp"
#include "manager/job_service.hpp"

#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// What engine clients ask for: hello, lookups, pins, reservations, sequences, and (handed on)
/// jobs.
/// @threading the loop's thread.
class ClientRequests {
 public:
  /// A client that schedules may have come or changed; the pause that it obeys.
  using OnScheduler = std::function<void(
      const ClientRecord& client, std::optional<ipc::PauseMode> paused, bool by_release)>;

  ClientRequests(ManagerContext& context, JobService& jobs, OnScheduler on_scheduler)
      : context_(context), jobs_(jobs), on_scheduler_(std::move(on_scheduler)) {}
  ClientRequests(const ClientRequests&) = delete;
  ClientRequests& operator=(const ClientRequests&) = delete;
  ~ClientRequests() = default;

  /// False when the kind is none of an engine client's.
  [[nodiscard]] bool handle(const ipc::Peer& peer, const ipc::Envelope& request);
  /// The client said bye, fell silent or died: pins and reservations go, its jobs are cancelled and
  /// drained unanswered. With sequences: those, too (not for a silent one, which may come back).
  void end_client(const ipc::IncarnationId& peer, bool with_sequences);
  /// The weights that the engine's workers compute with may be others: keys of its clients follow.
  void on_weights(const EngineRecord& engine);
  /// Holds the clients to the geometry that the engine's first worker or mover brought.
  void compare_clients(const EngineRecord& engine);
  /// Answers hellos that waited for jobs of clients that are gone.
  void answer_waiting_hellos();

 private:
  struct WaitingHello {
    ipc::Peer peer;
    ipc::Envelope request;
    std::uint32_t engine = 0;
    bool schedules = false;
    std::optional<ipc::PauseMode> paused;
    bool paused_by_release = false;
  };

  void hello(const ipc::Peer& peer, const ipc::Envelope& request);
  /// Of the namespace that a client names, if it may use that.
  /// Whether it may come as it says; its account then.
  [[nodiscard]] ipc::Status admit(const ipc::EngineHello& hello, ClientRecord& client);
  void lookup(const ClientRecord& client, const ipc::Envelope& request);
  void use(const ClientRecord& client, const ipc::Envelope& request);
  void pin(const ClientRecord& client, const ipc::Envelope& request);
  void pin_blocks(const ClientRecord& client, const ipc::Envelope& request);
  void reserve(const ClientRecord& client, const ipc::Envelope& request);
  void abandon(const ClientRecord& client, const ipc::Envelope& request);
  void cancel(const ClientRecord& client, const ipc::Envelope& request);
  void drop_sequence(const ClientRecord& client, const ipc::Envelope& request);
  /// The engine's configuration is known and the client fits it.
  [[nodiscard]] static ipc::Status check(const ClientRecord& client);
  template <typename T>
  [[nodiscard]] bool take(const ClientRecord& client,
                          const ipc::Envelope& request,
                          const char* name,
                          T& out);
  /// The same, of a client whose requests can be served now.
  template <typename T>
  [[nodiscard]] bool take_of_ready(const ClientRecord& client,
                                   const ipc::Envelope& request,
                                   const char* name,
                                   T& out);

  ManagerContext& context_;
  JobService& jobs_;
  const OnScheduler on_scheduler_;
  std::vector<WaitingHello> waiting_hellos_;
};

}  // namespace kvferry::cache_manager
