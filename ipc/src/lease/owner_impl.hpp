// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log_gate.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "lease/borrowed_remains.hpp"
#include "lease/lease_messages.hpp"
#include "lease/lease_slots.hpp"
#include "lease/lease_words.hpp"
#include "lease/posted_call.hpp"
#include "lease/prepare_mark.hpp"
#include "lease/quarantine.hpp"
#include "lease/strangers.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::ipc {

/// Grants and clears are served by one thread: not serialising them frees memory whose handle is on
/// its way to an attacher. Members without a note belong to that thread.
/// owner.cpp: set-up, init, shutdown, view; owner_peers.cpp: connections and grants;
/// owner_clear.cpp: clears.
class LeaseOwner::Impl {
 public:
  Impl(LeaseOptions options,
       const RuntimeDir& dir,
       Device& device,
       ArenaUser& user,
       LeaseChanged on_change,
       ArenaSource* source);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl();

  // From any thread.
  Result<Epoch> init(const ArenaLayout& layout, Deadline deadline);
  Result<ClearOutcome> clear(Epoch epoch, Deadline deadline);
  LeaseView view() const;

 private:
  enum class ClearStage : std::uint8_t {
    kWaiting,    ///< For every lease, by word or death, to the revoke deadline.
    kKilling,    ///< Movers were sent SIGKILL: for their proven death.
    kUnmapping,  ///< Legacy, after a death: until no other process maps the memory.
    kSettling,   ///< Freed, after a death: until the driver's free memory shows it.
  };

  /// One clear under way.
  struct ClearRun {
    Epoch epoch;
    TimePoint started;
    std::vector<lease::Answer<ClearOutcome>> answers;  ///< Of everybody who asked for it.
    MemoryInfo before;
    ClearStage stage = ClearStage::kWaiting;
    Deadline stage_end;
    TimerId timer = 0;
    std::uint64_t bytes = 0;
    lease::ReturnCheck check = {};    ///< Of the release.
    std::string own_work = {};        ///< Why our own user did not let go; empty: it did.
    std::vector<pid_t> holders = {};  ///< Seen mapping the memory just before our release.
    std::optional<Arena> freed = {};  ///< A borrowed one, released: to be looked at.
    std::string failure = {};         ///< Of its release.
  };

  // owner.cpp
  void run_thread();
  [[noreturn]] void fail_construction(Error error, const RuntimeDir& dir);
  Result<Epoch> init_now(const ArenaLayout& layout);
  Result<Arena> make_arena(Epoch epoch, const ArenaLayout& layout);
  Status check_borrowed(const Arena& arena) const;
  Status prepare_arena();
  void abandon_arena(Epoch epoch);
  void shut_down();
  [[nodiscard]] Duration longest_clear() const;
  void move_to(LeasePhase phase, Epoch epoch, std::string_view why);
  void record(Transition transition, Epoch epoch, std::uint64_t detail = 0) const {
    options_.transitions.record(transition,
                                {.session = session_, .epoch = epoch, .detail = detail});
  }
  [[nodiscard]] Status attempt(Transition transition, Epoch epoch) const {
    return options_.transitions.attempt(transition, {.session = session_, .epoch = epoch});
  }
  void record(Transition transition, const lease::Slot& slot, const lease::Lease& lease) const {
    options_.transitions.record(
        transition,
        {.session = session_, .epoch = lease.epoch, .lease = lease.id, .peer = slot.incarnation});
  }
  void note(std::string text) { note_ = std::move(text); }
  void changed();
  void tick();
  void arm_belt();
  [[nodiscard]] Epoch epoch() const noexcept { return words_.state().epoch; }
  [[nodiscard]] LeasePhase phase() const noexcept { return words_.state().phase; }
  [[nodiscard]] bool is_mover() const noexcept {
    return options_.identity.self == ProcessKind::kMover;
  }
  [[nodiscard]] std::uint64_t arena_bytes() const { return arena_ ? arena_->total_bytes() : 0; }
  [[nodiscard]] MemoryInfo memory_now();

  // owner_peers.cpp
  void on_stranger(PacketSocket socket, const Packet& packet);
  Status greet(PacketSocket& socket, const Packet& packet, IncarnationId& who);
  Status check_hello(const lease::HelloBody& hello, const ProcessRef& process);
  void admit(PacketSocket socket,
             const lease::HelloBody& hello,
             ProcessRef process,
             lease::AttacherWordsView words);
  void refuse(PacketSocket& socket, Error error, const IncarnationId& who = {});
  void on_connection(const IncarnationId& incarnation);
  Status on_message(lease::Slot& slot, const lease::Incoming& incoming);
  Status on_attach(lease::Slot& slot, Epoch min_epoch);
  void on_death(const IncarnationId& incarnation);
  void drop_connection(lease::Slot& slot, const Error& why);
  void close_connection(lease::Slot& slot);
  void serve_parked();
  [[nodiscard]] bool may_grant();
  [[nodiscard]] std::string why_not_yet();
  void grant(lease::Slot& slot);
  Status send_grant(lease::Slot& slot, const lease::Lease& lease, bool& left);
  lease::SlotTable::Release collect_words(lease::Slot& slot);
  void collect_releases();
  void end_preparing(LeaseId lease);

  // owner_clear.cpp
  void start_clear(Epoch wanted, const lease::Answer<ClearOutcome>& answer);
  [[nodiscard]] std::optional<Result<ClearOutcome>> clear_without_work(Epoch wanted) const;
  Status quiesce_own(Epoch epoch, Deadline deadline);
  bool own_user_let_go();
  void advance_clear();
  void on_clear_timer();
  void set_stage(ClearStage stage, Deadline end);
  void arm_clear_timer(TimePoint when);
  void end_movers();
  void free_arena();
  void release_arena();
  void check_settled();
  [[nodiscard]] lease::Remains remains_of(const Arena& released) const;
  void quarantine_remains(Epoch epoch, Arena freed, const std::string& failure);
  void quarantine_arena(std::string holder);
  void finish_clear(ClearKind kind, std::string detail, std::uint64_t quarantined_bytes);

  const RuntimeDir dir_;  ///< Keeps the directory while our names are in it.
  const LeaseOptions options_;
  const SessionId session_;
  const std::string tag_;  ///< "lease chat/0" for log lines.
  Device& device_;
  ArenaUser& user_;
  ArenaSource* const source_;  ///< Null: arenas are allocated here.
  const LeaseChanged on_change_;

  // Destroyed in reverse: mapped memory goes before the addresses set aside for it.
  AddressRanges ranges_;
  std::optional<Arena> arena_;
  bool accepted_ = false;    ///< arena_ is usable: our user took it.
  lease::PrepareMark mark_;  ///< Of the current epoch.
  std::string held_up_;      ///< Why the epoch is not granted yet; empty when it is.
  lease::Quarantine quarantine_;
  lease::OwnerWords words_;
  lease::SlotTable slots_;
  std::optional<PacketListener> listener_;
  std::optional<ClearRun> clear_;
  std::deque<ClearOutcome> outcomes_;  ///< Of the last clears, for repeated requests.
  std::string note_;
  std::optional<Error> peer_refused_;
  LogGate log_gate_;  ///< Of refusals.
  TimerId belt_ = 0;
  bool shut_ = false;

  mutable std::mutex view_mutex_;  ///< Guards view_.
  LeaseView view_;

  EventLoop loop_;
  std::optional<lease::Strangers> strangers_;  ///< Until the shutdown.
  std::optional<OwnThread> thread_;
};

}  // namespace kvferry::ipc
