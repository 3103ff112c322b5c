// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cache_tracker.hpp"
#include "job_tracker.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"
#include "kvferry/ipc/os/home_process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/worker/client.hpp"
#include "reconnector.hpp"
#include "schedule_orders.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::worker {

/// What is under a Client: the link to whichever manager lives, its events and replies, and the
/// jobs. pump() does all the work that does not block; every public call goes through it.
/// @threading one thread at a time.
class ClientLink {
 public:
  ClientLink(ClientOptions options, ipc::RuntimeDir dir);  ///< Throws Exception.
  ClientLink(const ClientLink&) = delete;
  ClientLink& operator=(const ClientLink&) = delete;
  ~ClientLink();

  /// The first connection: waits for a manager; other errors are returned, nothing is retried in
  /// the background.
  [[nodiscard]] Status connect(Deadline deadline);
  /// Says bye. Nothing reconnects afterwards.
  void close();

  /// Takes in whatever has arrived; notices a lost or a new manager. Never blocks.
  void pump();
  /// Waits until something has arrived or the deadline passes; then pumps. Callers look at what
  /// they wait for after every pump(), before the next wait. Looks for as long as awake before it
  /// sleeps.
  void wait(Deadline deadline, ipc::Duration awake = ipc::Duration::zero());

  /// Sends a request and waits for its reply. kNoManager while there is none, kPeerDied when it is
  /// lost meanwhile, kTimeout; the reply's own error otherwise.
  [[nodiscard]] Result<ipc::Bytes> request(ipc::MessageKind kind,
                                           ipc::Bytes body,
                                           Deadline deadline);
  template <typename Reply, typename Request>
  [[nodiscard]] Result<Reply> call(ipc::MessageKind kind, const Request& body, Deadline deadline) {
    KVFERRY_ASSIGN(const ipc::Bytes bytes, request(kind, ipc::encode(body), deadline));
    return ipc::decode<Reply>(bytes, "reply");
  }
  /// The same for a command that may come back as an order to this client's own scheduler.
  template <typename Reply, typename Request>
  [[nodiscard]] Result<Reply> call_and_obey(ipc::MessageKind kind,
                                            const Request& body,
                                            Deadline deadline) {
    obeys_while_waiting_ = true;
    auto reply = call<Reply>(kind, body, deadline);
    obeys_while_waiting_ = false;
    return reply;
  }
  /// Sends a request whose reply matters only when it is an error.
  [[nodiscard]] Status send_only(ipc::MessageKind kind, ipc::Bytes body);
  /// Sends what nobody answers.
  [[nodiscard]] Status tell(ipc::MessageKind kind, ipc::Bytes body);
  /// The manager's prefix table, to be looked at by the root and rules below. kNoManager,
  /// kCancelled, kGeometryMismatch (CacheState::refused), kNotReady (no worker has registered yet).
  [[nodiscard]] Result<const ipc::PrefixTableView*> table();
  [[nodiscard]] const Digest& root() const noexcept { return cache_.root(); }
  [[nodiscard]] const std::vector<ipc::GroupRule>& rules() const noexcept { return cache_.rules(); }
  [[nodiscard]] std::uint32_t unit_blocks() const noexcept { return options_.identity.unit_blocks; }
  /// Sends a job and tracks it; a refusal becomes its completion.
  [[nodiscard]] Status submit(ipc::MessageKind kind,
                              JobId job,
                              ipc::Bytes body,
                              std::span<const DeviceBlock> blocks);

  /// When the oldest job was sent that has neither been taken nor refused yet.
  [[nodiscard]] std::optional<ipc::TimePoint> unanswered_since();

  /// Changes of the state, when the options ask for them.
  [[nodiscard]] std::vector<CacheEvent> take_events() { return cache_.take_events(); }

  /// Begins what the manager ordered the engine's scheduler to do, answers what is in effect.
  void serve_orders();
  /// Something was taken that may have kept an order from being in effect.
  void look_at_orders_again() noexcept { orders_.look_again(); }

  /// Keeps fd() readable exactly while there are completions, releases, events or orders to take.
  void update_news();

  [[nodiscard]] int fd() const noexcept { return epoll_.get(); }
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  /// True in a child that was forked from the client's process: closed, and nothing that is shared
  /// with the parent is touched any more.
  bool is_forked();
  /// Why nothing can be asked of a closed client.
  [[nodiscard]] ipc::Error closed_error() const;
  [[nodiscard]] const ClientOptions& options() const noexcept { return options_; }
  [[nodiscard]] const CacheState& state() const noexcept { return cache_.state(); }
  /// The generation that the engine knows: submits name it, so that work decided on before a clear
  /// is refused and not done on blocks that meanwhile belong to another arena.
  void acknowledge_generation() noexcept {
    acknowledged_ = state().generation;
    acknowledged_weights_ = state().weights;
  }
  void acknowledge_generation(std::uint64_t generation) noexcept { acknowledged_ = generation; }
  /// The weights that the engine knows to be in use: it computes with no others.
  [[nodiscard]] const Digest& acknowledged_weights() const noexcept {
    return acknowledged_weights_;
  }
  [[nodiscard]] std::uint64_t acknowledged_generation() const noexcept { return acknowledged_; }
  [[nodiscard]] JobTracker& jobs() noexcept { return jobs_; }
  [[nodiscard]] ClientStats& stats() noexcept { return stats_; }

 private:
  /// What a request that is on its way is for.
  struct Pending {
    ipc::MessageKind kind = ipc::MessageKind::kBye;
    bool wanted = false;                 ///< request() waits for it.
    std::optional<JobId> job;            ///< submit().
    std::optional<ipc::Envelope> reply;  ///< Once there, when wanted.
    ipc::TimePoint sent{};
  };

  [[nodiscard]] ipc::ControlLink::Options link_options() const;
  [[nodiscard]] ipc::Bytes hello() const;
  [[nodiscard]] Result<std::unique_ptr<ipc::ControlLink>> await_manager(Deadline deadline) const;
  [[nodiscard]] Status check_connected();
  [[nodiscard]] Result<ipc::RequestId> send(ipc::MessageKind kind,
                                            ipc::Bytes body,
                                            Pending pending);
  void adopt(std::unique_ptr<ipc::ControlLink> link);
  void take_reconnected();
  void lose(std::string_view why);
  void reconnect(ipc::Duration after);
  void on_envelope(ipc::Envelope envelope);
  void on_reply(ipc::Envelope envelope);
  /// A hello is answered with the engine's state.
  [[nodiscard]] Status on_hello_reply(const ipc::Envelope& envelope);
  void give_up_late_reservations(const ipc::Envelope& envelope);
  void on_hello_refused(const ipc::Error& error);
  void settle_orphans();
  void count_settled(std::size_t jobs) noexcept;
  void on_job_done(const ipc::Envelope& envelope);
  void send_reply(const ipc::Envelope& reply);
  void watch(int fd);

  const ipc::HomeProcess home_;
  const ClientOptions options_;
  const ipc::RuntimeDir dir_;
  /// One for all connections: a manager that lost sight of us for a moment takes us for the same
  /// engine. Request ids go on counting, so that no remembered reply is taken for another's.
  const ipc::IncarnationId incarnation_ = ipc::IncarnationId::random();
  const ipc::TransitionLog transitions_;
  ipc::UniqueFd epoll_;
  ipc::EventFd news_;
  bool news_signalled_ = false;
  std::unique_ptr<ipc::ControlLink> link_;
  std::optional<ipc::PrefixTableView> table_;  ///< The link's manager's.
  std::unique_ptr<Reconnector> reconnector_;
  ipc::SessionId manager_;  ///< Of the link, or of the last one.
  bool greeted_ = false;    ///< The manager accepted our hello.
  /// Its answer to the first hello, once there.
  std::optional<Status> first_greeting_;
  bool was_greeted_ = false;  ///< Ever.
  bool closed_ = false;
  std::uint64_t last_request_ = 0;
  std::map<std::uint64_t, Pending> pending_;  ///< By request, which is by age.
  std::uint64_t acknowledged_ = 0;
  Digest acknowledged_weights_;
  ClientStats stats_;
  CacheTracker cache_{options_, stats_};
  JobTracker jobs_{transitions_};
  ScheduleOrders orders_;
  bool obeys_while_waiting_ = false;
};

}  // namespace kvferry::worker
