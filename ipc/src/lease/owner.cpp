// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "lease/hello.hpp"
#include "lease/owner_impl.hpp"
#include "lease/view_equality.hpp"

#include <unistd.h>

#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kBelt = std::chrono::milliseconds(250);
// What a clear may take beyond its stages: calls into the driver and the scheduler.
constexpr auto kSlack = std::chrono::seconds(2);

lease::OwnerWords create_words(SessionId session) {
  auto created = lease::OwnerWords::create(session);
  if (!created) throw Exception(std::move(created).error());
  return std::move(created).value();
}

Transition transition_to(LeasePhase phase) noexcept {
  switch (phase) {
    case LeasePhase::kReady: return Transition::kOwnerReady;
    case LeasePhase::kRevoking: return Transition::kOwnerRevoke;
    case LeasePhase::kCleared: return Transition::kOwnerCleared;
    case LeasePhase::kQuarantined: return Transition::kOwnerQuarantined;
    case LeasePhase::kShutdown: return Transition::kOwnerShutdown;
    case LeasePhase::kVacant: break;
  }
  return Transition::kNone;
}

Status fits_grant(const std::string& tag, const ArenaLayout& layout) {
  if (layout.segment_bytes.size() <= lease::kMaxHandles &&
      encode(layout).size() <= lease::kMaxLayoutBytes) {
    return ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: a layout of {} segments and {} regions does not fit a grant of {} "
                       "bytes; use an order with fewer segments",
                       tag, layout.segment_bytes.size(), layout.regions.size(),
                       lease::kMaxLayoutBytes);
}

}  // namespace

LeaseOwner::Impl::Impl(LeaseOptions options,
                       const RuntimeDir& dir,
                       Device& device,
                       ArenaUser& user,
                       LeaseChanged on_change,
                       ArenaSource* source)
    : dir_(dir),
      options_(std::move(options)),
      session_(Digest::random()),
      tag_(fmt::format("lease {}/{}", options_.identity.engine, options_.identity.rank.value)),
      device_(device),
      user_(user),
      source_(source),
      on_change_(std::move(on_change)),
      quarantine_(device, user, [this](Epoch epoch) { record(Transition::kOwnerReap, epoch); }),
      words_(create_words(session_)) {
  if (!options_.identity.is_owner()) {
    throw Exception(KVFERRY_ERROR(kInvalidArgument, "{}: a {} with --cache-owner {} is no owner",
                                  tag_, to_string(options_.identity.self),
                                  to_string(options_.identity.cache_owner)));
  }
  if (source_ != nullptr && is_mover()) {
    throw Exception(KVFERRY_ERROR(kInvalidArgument,
                                  "{}: a mover cannot lend an engine's memory; regions are "
                                  "registered by the worker, with --cache-owner worker",
                                  tag_));
  }
  auto listening = PacketListener::listen(
      dir.rank_socket(options_.identity.engine, options_.identity.rank.value, "lease"));
  if (!listening) fail_construction(std::move(listening).error(), dir);
  listener_.emplace(std::move(listening).value());
  options_.transitions.record(
      Transition::kHelloListen,
      {.session = session_, .detail = lease::compared_as_listener(options_.identity)});
  view_.session = session_;
  strangers_.emplace(
      loop_, *listener_, tag_, options_.timeouts.hello,
      lease::Strangers::Hooks{
          .on_packet = [this](PacketSocket socket,
                              const Packet& packet) { on_stranger(std::move(socket), packet); },
          .on_surplus = [this](PacketSocket& socket,
                               Error error) { refuse(socket, std::move(error)); }});
  log_info("{}: session {} owned by {} pid {}, handles {}", tag_, session_.hex(),
           to_string(options_.identity.self), ::getpid(), to_string(options_.identity.handles));
  const auto runs = is_mover() ? OwnThread::Runs::kOurCode : OwnThread::Runs::kEngineCode;
  thread_.emplace("kvf-lease", runs, [this] { run_thread(); });
}

// The living owner is told who came, so that both sides know of the conflict.
void LeaseOwner::Impl::fail_construction(Error error, const RuntimeDir& dir) {
  if (error.code != ErrorCode::kAlreadyExists) throw Exception(std::move(error));
  const auto& me = options_.identity;
  const Deadline deadline = Deadline::after(options_.timeouts.hello);
  auto socket = PacketSocket::connect(dir.rank_socket(me.engine, me.rank.value, "lease"), deadline);
  auto words = lease::AttacherWords::create(me.incarnation);
  if (!socket || !words) throw Exception(std::move(error));
  const int fd = words->fd();
  options_.transitions.record(Transition::kHelloSay,
                              {.detail = lease::compared_as_greeter(options_.identity)});
  if (!lease::send(*socket, lease::LeaseMessage::kHello, lease::HelloBody{me}, {&fd, 1})) {
    throw Exception(std::move(error));
  }
  // wait: the living owner's refusal; deadline (hello); the end of the connection
  auto packet = socket->receive(deadline);
  if (!packet) throw Exception(std::move(error));
  const auto incoming = lease::read_header(std::move(packet).value());
  if (incoming && incoming->message == lease::LeaseMessage::kRefused) {
    auto refused = lease::read_body<lease::RefusedBody>(*incoming, "Refused");
    if (refused) {
      const auto code = static_cast<std::uint64_t>(refused->error.code);
      options_.transitions.record(lease::is_permanent(refused->error)
                                      ? Transition::kHelloRefused
                                      : Transition::kHelloTurnedAway,
                                  {.detail = code});
      options_.transitions.record(Transition::kHelloGivesUp, {.detail = code});
      throw Exception(std::move(refused->error));
    }
  }
  throw Exception(std::move(error));
}

LeaseOwner::Impl::~Impl() {
  const LeaseView now = view();
  if (now.phase == LeasePhase::kReady || now.phase == LeasePhase::kRevoking) {
    const auto ended = clear(now.epoch, Deadline::after(longest_clear()));
    if (!ended) log_error("{}: shutdown: {}", tag_, ended.error().to_string());
  }
  loop_.post([this] { shut_down(); });
  // wait-brief: the lease's own thread, after the last clear; it closes and ends, limit
  // OwnThread::kEndsWithin
  thread_->wait_end();
  if (arena_) {
    // Our own user did not let go: unmapping under it would fault. The driver takes the memory back
    // when this process ends.
    log_error("{}: epoch {} stays mapped until this process ends", tag_, epoch().value);
    keep_until_process_end(std::move(*arena_));
    keep_until_process_end(std::move(ranges_));
  }
}

void LeaseOwner::Impl::run_thread() {
  const bool ended_by_stop = loop_.run();
  KVFERRY_CHECK(ended_by_stop, fmt::format("{}: the lease thread failed", tag_));
}

void LeaseOwner::Impl::shut_down() {
  shut_ = true;
  collect_releases();
  if (can_move(phase(), LeasePhase::kShutdown)) {
    move_to(LeasePhase::kShutdown, epoch(), "the owner ends");
  }
  slots_.for_each([this](lease::Slot& slot) {
    close_connection(slot);
    loop_.unwatch(slot.process.pidfd());
  });
  strangers_.reset();
  changed();
  loop_.stop();
}

Result<Epoch> LeaseOwner::Impl::init(const ArenaLayout& layout, Deadline deadline) {
  const lease::Answer<Epoch> answer;
  loop_.post([this, answer, layout] {
    Result<Epoch> result = init_now(layout);
    tick();  // before the answer: the caller finds the new view
    answer.set(std::move(result));
  });
  // wait: own lease thread, which allocates, and zeroes within its user's limit; deadline, of the
  // caller; nothing
  auto result = answer.wait(deadline);
  if (result) return std::move(*result);
  return KVFERRY_ERROR(kTimeout, "{}: init still runs at its deadline; it may yet succeed", tag_);
}

Result<Epoch> LeaseOwner::Impl::init_now(const ArenaLayout& layout) {
  if (clear_ || arena_) {
    return KVFERRY_ERROR(kBusy, "{}: epoch {} is {}; clear it before the next init", tag_,
                         epoch().value, to_string(phase()));
  }
  const auto& me = options_.identity;
  if (layout.fingerprint != me.fingerprint) {
    return KVFERRY_ERROR(kGeometryMismatch, "{}: layout of geometry {}, this owner has {}", tag_,
                         layout.fingerprint.hex(), me.fingerprint.hex());
  }
  KVFERRY_TRY(fits_grant(tag_, layout));
  collect_releases();
  if (quarantine_.holds_own_user()) {
    return KVFERRY_ERROR(kQuarantined,
                         "{}: no next epoch while the last one is in use here: {}; wait until that "
                         "work ends, or restart this process",
                         tag_, quarantine_.describe());
  }
  const Epoch next{epoch().value + 1};
  KVFERRY_CHECK(next.value <= words::kMaxEpoch, "epochs are used up");
  auto arena = make_arena(next, layout);
  if (!arena) {
    Error error = std::move(arena).error();
    if (error.code == ErrorCode::kNoDeviceMemory && !quarantine_.empty()) {
      return KVFERRY_ERROR(kQuarantined, "{}: no memory for epoch {} while in quarantine: {}; {}",
                           tag_, next.value, quarantine_.describe(), error.message);
    }
    return error;
  }
  arena_.emplace(std::move(arena).value());
  if (Status prepared = prepare_arena(); !prepared) {
    abandon_arena(next);
    note(prepared.error().to_string());
    return std::move(prepared).error();
  }
  accepted_ = true;
  mark_.begin(/*by_owner=*/!is_mover());
  held_up_.clear();
  note({});
  move_to(LeasePhase::kReady, next, "init");
  return next;
}

Result<Arena> LeaseOwner::Impl::make_arena(Epoch epoch, const ArenaLayout& layout) {
  const HandleKind handles = options_.identity.handles;
  KVFERRY_TRY(attempt(Transition::kOwnerAllocate, epoch));
  if (source_ == nullptr) {
    const bool stable = options_.stable_addresses && handles == HandleKind::kVmm;
    return Arena::allocate(device_, epoch, layout, handles, stable ? &ranges_ : nullptr);
  }
  KVFERRY_ASSIGN(Arena arena, Arena::borrow(device_, epoch, layout, handles, *source_));
  if (Status sound = check_borrowed(arena); !sound) {
    if (Status released = arena.release(); !released) {
      quarantine_remains(epoch, std::move(arena), released.error().message);
    }
    return std::move(sound).error();
  }
  log_info("{}: epoch {}: {} regions of this process's engine in {} allocations", tag_, epoch.value,
           arena.layout().regions.size(), arena.borrowed().size());
  return arena;
}

Status LeaseOwner::Impl::check_borrowed(const Arena& arena) const {
  KVFERRY_TRY(fits_grant(tag_, arena.layout()));
  const std::string overlap = quarantine_.overlap_with(arena);
  if (overlap.empty()) return ok();
  return KVFERRY_ERROR(kQuarantined,
                       "{}: {} share memory, which a peer may still write ({}); keep an epoch's "
                       "tensors until release() is called, and allocate others",
                       tag_, overlap, quarantine_.describe());
}

Status LeaseOwner::Impl::prepare_arena() {
  KVFERRY_TRY(user_.on_mapped(session_, *arena_, ArenaContents::kUndefined));
  // Found now, not when the first attacher asks.
  KVFERRY_TRY(arena_->export_handles());
  return ok();
}

// The epoch was never published, so no other process has it: only our own user can stand in the
// way.
void LeaseOwner::Impl::abandon_arena(Epoch epoch) {
  const Status idle = quiesce_own(epoch, Deadline::after(options_.timeouts.drain));
  if (!idle) {
    record(Transition::kOwnerKeep, epoch, arena_->total_bytes());
    quarantine_.add({.epoch = epoch,
                     .bytes = arena_->total_bytes(),
                     .holder = fmt::format("our own user: {}", idle.error().message),
                     .ranges = std::exchange(ranges_, {}),
                     .arena = std::exchange(arena_, std::nullopt),
                     .own_user = true});
    return;
  }
  user_.on_unmapped(epoch);
  const Status released = arena_->release();
  if (!released) {
    log_error("{}: epoch {}: {}", tag_, epoch.value, released.error().to_string());
  }
  Arena freed = std::move(*arena_);
  arena_.reset();
  if (freed.is_borrowed()) {
    quarantine_remains(epoch, std::move(freed), released ? "" : released.error().message);
  }
}

Result<ClearOutcome> LeaseOwner::Impl::clear(Epoch epoch, Deadline deadline) {
  const lease::Answer<ClearOutcome> answer;
  loop_.post([this, answer, epoch] {
    start_clear(epoch, answer);
    tick();
  });
  // wait: own lease thread, whose clear ends by its stages; deadline, of the caller; nothing
  auto result = answer.wait(deadline);
  if (result) return std::move(*result);
  return KVFERRY_ERROR(kTimeout,
                       "{}: clear of epoch {} still runs at its caller's deadline and goes on; ask "
                       "again for its outcome",
                       tag_, epoch.value);
}

// A terabyte of pinned memory bounds the kill's share.
Duration LeaseOwner::Impl::longest_clear() const {
  constexpr int kMostPinnedGib = 1024;
  const auto& times = options_.timeouts;
  return times.drain + times.revoke + times.kill + kMostPinnedGib * times.kill_per_pinned_gib +
         2 * times.settle + kSlack;
}

LeaseView LeaseOwner::Impl::view() const {
  const std::lock_guard lock(view_mutex_);
  return view_;
}

void LeaseOwner::Impl::move_to(LeasePhase phase, Epoch epoch, std::string_view why) {
  const words::OwnerState from = words_.state();
  record(transition_to(phase), epoch);
  words_.move({epoch, phase});
  record(Transition::kOwnerPublished, epoch);
  log_info("{}: epoch {} {} -> epoch {} {}: {}", tag_, from.epoch.value, to_string(from.phase),
           epoch.value, to_string(phase), why);
}

MemoryInfo LeaseOwner::Impl::memory_now() {
  const auto memory = device_.memory_info();
  if (memory) return *memory;
  log_warn("{}: device memory cannot be read: {}", tag_, memory.error().to_string());
  return {};
}

// Whatever happened: look at the words (they are the truth), go on with a clear, reap, tell.
void LeaseOwner::Impl::tick() {
  if (shut_) return;
  collect_releases();
  advance_clear();
  serve_parked();
  changed();
  arm_belt();
}

// A doorbell can be lost (full buffer, peer killed between store and ring), and nothing rings when
// memory comes back: while somebody is waited for, the words are looked at regularly as well.
void LeaseOwner::Impl::arm_belt() {
  const bool needed = clear_ || !quarantine_.empty() || !held_up_.empty() ||
                      (arena_ && mark_.state() == lease::PrepareMark::State::kPreparing);
  if (needed == (belt_ != 0)) return;
  if (!needed) {
    loop_.cancel(belt_);
    belt_ = 0;
    return;
  }
  belt_ = loop_.after(kBelt, [this] {
    belt_ = 0;
    tick();
  });
}

void LeaseOwner::Impl::changed() {
  LeaseView now;
  now.session = session_;
  now.epoch = epoch();
  now.phase = phase();
  now.mapped = arena_ && accepted_;
  if (now.mapped) {
    now.prepared_by = mark_.prepared_by();
    for (const GroupLayout& group : arena_->layout().groups) {
      now.group_blocks.push_back(group.block_count);
    }
  }
  now.lease_holders = slots_.holders();
  now.quarantined_bytes = quarantine_.bytes();
  now.note = note_;
  if (now.note.empty()) now.note = held_up_;
  if (now.note.empty() && !quarantine_.empty()) now.note = quarantine_.describe();
  now.peer_refused = peer_refused_;
  {
    const std::lock_guard lock(view_mutex_);
    if (lease::same_view(view_, now)) return;
    now.number = view_.number + 1;
    view_ = now;
  }
  if (on_change_) on_change_(now);
}

LeaseOwner::LeaseOwner(LeaseOptions options,
                       const RuntimeDir& dir,
                       Device& device,
                       ArenaUser& user,
                       LeaseChanged on_change,
                       ArenaSource* source)
    : impl_(std::make_unique<Impl>(
          std::move(options), dir, device, user, std::move(on_change), source)) {}

LeaseOwner::~LeaseOwner() { forget_in_child(home_, impl_); }

Result<Epoch> LeaseOwner::init(const ArenaLayout& layout, Deadline deadline) {
  return impl_->init(layout, deadline);
}

Result<ClearOutcome> LeaseOwner::clear(Epoch epoch, Deadline deadline) {
  return impl_->clear(epoch, deadline);
}

LeaseView LeaseOwner::view() const { return impl_->view(); }

}  // namespace kvferry::ipc
