// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/name_watch.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "lease/grant_assembly.hpp"
#include "lease/lease_messages.hpp"
#include "lease/lease_words.hpp"
#include "lease/posted_call.hpp"
#include "lease/rendezvous.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace kvferry::ipc {

/// Members without a note belong to the lease thread. While it maps anything, that thread waits for
/// nothing but its own user's quiesce().
/// attacher.cpp: set-up, calls, view; attacher_connect.cpp: search, hello, messages;
/// attacher_map.cpp: import and detach.
class LeaseAttacher::Impl {
 public:
  Impl(LeaseOptions options,
       const RuntimeDir& dir,
       Device& device,
       const Geometry& geometry,
       ArenaUser& user,
       LeaseChanged on_change);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // From any thread.
  Result<ClearOutcome> detach(Epoch epoch, Deadline deadline);
  Status wait_mapped(Epoch at_least, Deadline deadline, const SessionId& of);
  void cancel_waits() noexcept;
  LeaseView view() const;

 private:
  enum class Stage : std::uint8_t {
    kSearching,  ///< No owner is connected.
    kHello,      ///< Said hello, waits for the welcome.
    kIdle,       ///< Connected; next request after a back-off.
    kWaiting,    ///< Asked for an epoch; holds nothing.
    kMapped,     ///< Holds a lease and its memory.
    kStuck,      ///< Must let go but its user did not: still holds both.
    kRefused,    ///< For good.
  };

  /// The memory of a lease, held from import to the last close.
  struct Held {
    LeaseId lease;
    Arena arena;
    bool accepted = false;  ///< Our user took it.
    LeaseId prepared_by;    ///< Lease that its contents go back to; 0: the owner itself.
  };

  /// What was there when a wait for an epoch began.
  struct Wait {
    Epoch at_least;
    SessionId of;  ///< Zero: any.
    std::uint64_t deaths = 0;
    std::uint64_t sessions = 0;
    Epoch revoked;
  };

  // attacher.cpp
  Status await_mapped(Epoch at_least, Deadline deadline, const SessionId& of);
  [[nodiscard]] bool has_ended(const Wait& wait) const;
  [[nodiscard]] std::optional<Error> why_over(const Wait& wait) const;
  void run_thread();
  void shut_down();
  void say_bye();
  void decline_grant(const lease::Incoming& incoming);
  Result<ClearOutcome> detach_now(Epoch epoch);
  void record(Transition transition,
              Epoch epoch,
              LeaseId lease = {},
              std::uint64_t detail = 0) const {
    options_.transitions.record(
        transition, {.session = session_, .epoch = epoch, .lease = lease, .detail = detail});
  }
  [[nodiscard]] Status attempt(Transition transition,
                               Epoch epoch,
                               LeaseId lease = {},
                               std::uint64_t detail = 0) const {
    return options_.transitions.attempt(
        transition, {.session = session_, .epoch = epoch, .lease = lease, .detail = detail});
  }
  void tell_refusal(Transition transition, const Error& error) const {
    options_.transitions.record(transition, {.detail = static_cast<std::uint64_t>(error.code)});
  }
  void note(std::string text) { view_draft_.note = std::move(text); }
  void changed();
  void session_ended(const SessionId& session);
  void belt();
  [[nodiscard]] bool is_mover() const noexcept {
    return options_.identity.self == ProcessKind::kMover;
  }

  // attacher_connect.cpp
  void search(std::string why);
  void try_connect();
  void schedule_search();
  Status say_hello(PacketSocket socket);
  void on_packets();
  Status on_message(lease::Incoming incoming);
  Status on_welcome(lease::Incoming incoming);
  void on_refused(Error error);
  void lose_owner(const std::string& why);
  void follow(ProcessRef departed, const SessionId& session);
  void on_departed_death();
  void close_connection();
  void refuse_for_good(Error error);
  void request_epoch();
  void request_after_backoff();

  // attacher_map.cpp
  void on_grant(lease::Grant grant);
  Status import(lease::Grant& grant);
  void say_prepared(LeaseId lease);
  void acknowledge(LeaseId lease);
  void release_up_to(LeaseId lease);
  void return_unopened(LeaseId lease);
  void check_word();
  Status let_go(Deadline deadline, std::string_view why);
  Status close_arena();
  void stay_stuck(const Error& why);
  void go_on();

  const RuntimeDir dir_;  ///< Keeps the directory while our names are in it.
  const LeaseOptions options_;
  const std::filesystem::path owner_path_;
  const std::filesystem::path rendezvous_path_;
  const std::string tag_;
  Device& device_;
  ArenaUser& user_;
  const LeaseChanged on_change_;

  // Destroyed in reverse: mapped memory goes before the addresses set aside for it.
  AddressRanges ranges_;
  std::optional<Held> held_;
  Stage stage_ = Stage::kSearching;
  bool owner_lost_ = false;   ///< Stuck, and its owner is gone: search once let go.
  bool memory_lost_ = false;  ///< A segment could not be closed: this process must end.
  Epoch next_epoch_{1};       ///< Smallest epoch to ask for.
  SessionId session_;
  std::optional<PacketSocket> socket_;
  ProcessRef owner_;
  ProcessRef departed_;  ///< Last owner whose connection ended, until its death is proven.
  SessionId departed_session_;
  std::optional<lease::OwnerWordsView> owner_words_;
  std::optional<lease::AttacherWords> words_;  ///< One segment per connection.
  lease::GrantAssembly assembly_;
  std::optional<NameWatch> name_watch_;
  std::chrono::milliseconds search_backoff_{};
  std::chrono::milliseconds import_backoff_{};
  bool search_logged_ = false;
  TimerId timer_ = 0;  ///< Search back-off, hello deadline, request back-off or stuck retry.
  TimerId belt_ = 0;
  bool shut_ = false;
  LeaseView view_draft_;

  mutable std::mutex view_mutex_;  ///< Guards the next nine.
  std::condition_variable view_changed_;
  LeaseView view_;
  bool waits_cancelled_ = false;
  std::uint64_t deaths_ = 0;              ///< Of owners.
  std::deque<SessionId> ended_sessions_;  ///< Their latest.
  SessionId last_session_;                ///< Of the owner that was connected last.
  std::uint64_t sessions_ = 0;            ///< Connected ever.
  Epoch detached_;                        ///< Highest epoch of that session let go of unasked.
  Epoch last_revoked_;                    ///< Highest epoch of the last session seen revoked.

  EventLoop loop_;
  lease::Rendezvous rendezvous_;
  std::optional<OwnThread> thread_;
};

}  // namespace kvferry::ipc
