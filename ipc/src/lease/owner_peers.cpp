// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "lease/hello.hpp"
#include "lease/owner_impl.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

using lease::Incoming;
using lease::LeaseMessage;
using lease::Slot;

// Packets of one connection per round, so that a flood of one peer does not hold up the others.
constexpr int kPacketsPerRound = 16;

}  // namespace

void LeaseOwner::Impl::on_stranger(PacketSocket socket, const Packet& packet) {
  IncarnationId who;
  if (Status greeted = greet(socket, packet, who); !greeted) {
    refuse(socket, std::move(greeted).error(), who);
  }
  tick();
}

void LeaseOwner::Impl::refuse(PacketSocket& socket, Error error, const IncarnationId& who) {
  std::uint64_t suppressed = 0;
  if (log_gate_.open(suppressed)) {
    log_warn("{}: peer refused: {} ({} more like it)", tag_, error.to_string(), suppressed);
    // Those whom nobody admits cannot push all else out of the records.
    options_.transitions.record(
        Transition::kHelloRefuse,
        {.session = session_, .peer = who, .detail = static_cast<std::uint64_t>(error.code)});
  }
  note(error.to_string());
  if (const Status sent = lease::send(socket, LeaseMessage::kRefused, lease::RefusedBody{error});
      !sent) {
    log_debug("{}: refusal not sent: {}", tag_, sent.error().to_string());
  }
  peer_refused_ = std::move(error);
}

Status LeaseOwner::Impl::greet(PacketSocket& socket, const Packet& packet, IncarnationId& who) {
  auto process = socket.peer();
  if (!process) return std::move(process).error();
  Packet copy;
  copy.bytes = packet.bytes;
  KVFERRY_ASSIGN(const Incoming incoming, lease::read_header(std::move(copy)));
  if (incoming.message != LeaseMessage::kHello) {
    return KVFERRY_ERROR(kProtocol, "{}: message {} of pid {} before its hello", tag_,
                         static_cast<int>(incoming.message), process->pid());
  }
  if (incoming.version != kLeaseProtocolVersion) {
    return lease::version_mismatch(kLeaseProtocolVersion, incoming.version, process->pid());
  }
  if (packet.fds.size() != 1) {
    return KVFERRY_ERROR(kProtocol, "{}: hello of pid {} came with {} descriptors, expected 1",
                         tag_, process->pid(), packet.fds.size());
  }
  KVFERRY_ASSIGN(const lease::HelloBody hello,
                 lease::read_body<lease::HelloBody>(incoming, "Hello"));
  who = hello.identity.incarnation;
  KVFERRY_TRY(check_hello(hello, *process));
  KVFERRY_ASSIGN(lease::AttacherWordsView words,
                 lease::AttacherWordsView::map(packet.fds.front(), hello.identity.incarnation));
  KVFERRY_TRY(
      options_.transitions.attempt(Transition::kHelloWelcome, {.session = session_, .peer = who}));
  admit(std::move(socket), hello, std::move(process).value(), std::move(words));
  return ok();
}

Status LeaseOwner::Impl::check_hello(const lease::HelloBody& hello, const ProcessRef& process) {
  Status alike =
      lease::compare_identities(options_.identity, ::getpid(), hello.identity, process.pid());
  if (!alike && !is_mutant("welcomes_what_differs")) return alike;
  Slot* slot = slots_.find(hello.identity.incarnation);
  if (slot != nullptr && is_mutant("refuses_the_returning")) {
    return KVFERRY_ERROR(kRoleConflict, "{}: pid {} was here", tag_, process.pid());
  }
  if (slot == nullptr) {
    if (slots_.full()) {
      return KVFERRY_ERROR(kBusy, "{}: {} attacher processes live already", tag_,
                           lease::SlotTable::kMaxSlots);
    }
    // Slots end with their process, so that one process could take them all.
    if (slots_.count_of(process) >= lease::SlotTable::kMaxPerProcess) {
      return KVFERRY_ERROR(kBusy, "{}: pid {} has been {} attachers already; restart it", tag_,
                           process.pid(), lease::SlotTable::kMaxPerProcess);
    }
    return ok();
  }
  if (slot->process.pid() != process.pid() || slot->process.start_time() != process.start_time()) {
    return KVFERRY_ERROR(kProtocol, "{}: pid {} says it is incarnation {}, which is pid {}", tag_,
                         process.pid(), hello.identity.incarnation.hex(), slot->process.pid());
  }
  if (slot->distrusted) {
    return KVFERRY_ERROR(kProtocol, "{}: {} forged its words; restart it", tag_, slot->name());
  }
  return ok();
}

void LeaseOwner::Impl::admit(PacketSocket socket,
                             const lease::HelloBody& hello,
                             ProcessRef process,
                             lease::AttacherWordsView words) {
  const IncarnationId incarnation = hello.identity.incarnation;
  Slot* slot = slots_.find(incarnation);
  if (slot == nullptr) {
    slot = &slots_.add(incarnation, hello.identity.self, std::move(process));
    loop_.watch(slot->process.pidfd(), [this, incarnation] { on_death(incarnation); });
  } else {
    // A new connection of a living process: its earlier words are read one last time.
    if (collect_words(*slot) == lease::SlotTable::Release::kForged) {
      log_warn("{}: {} forged its words; dropped", tag_, slot->name());
      close_connection(*slot);
      return;
    }
    close_connection(*slot);
  }
  slot->words.emplace(std::move(words));
  slot->wanted.reset();
  slot->connection.emplace(std::move(socket));
  lease::WelcomeBody welcome;
  welcome.owner.identity = options_.identity;
  welcome.session = session_;
  welcome.last_lease = slot->last_lease;
  const int words_fd = words_.fd();
  if (const Status sent =
          lease::send(*slot->connection, LeaseMessage::kWelcome, welcome, {&words_fd, 1});
      !sent) {
    drop_connection(*slot, sent.error());
    return;
  }
  loop_.watch(slot->connection->fd(), [this, incarnation] { on_connection(incarnation); });
  log_info("{}: {} connected, incarnation {}", tag_, slot->name(), incarnation.hex());
}

void LeaseOwner::Impl::on_connection(const IncarnationId& incarnation) {
  for (int i = 0; i < kPacketsPerRound; ++i) {
    Slot* slot = slots_.find(incarnation);
    if (slot == nullptr || !slot->connection) break;
    auto packet = slot->connection->try_receive();
    if (!packet) {
      // Closed is not dead: its lease lives on until the word or the pidfd says otherwise.
      log_info("{}: {} closed its connection ({})", tag_, slot->name(), packet.error().message);
      close_connection(*slot);
      if (is_mutant("eof_is_death")) slot->lease.reset();
      break;
    }
    if (!packet->has_value()) break;
    const auto incoming = lease::read_header(std::move(**packet));
    const Status handled = incoming ? on_message(*slot, *incoming) : Status(incoming.error());
    if (!handled) drop_connection(*slot, handled.error());
  }
  tick();
}

Status LeaseOwner::Impl::on_message(Slot& slot, const Incoming& incoming) {
  switch (incoming.message) {
    case LeaseMessage::kAttach: {
      KVFERRY_ASSIGN(const lease::AttachBody body,
                     lease::read_body<lease::AttachBody>(incoming, "Attach"));
      return on_attach(slot, body.min_epoch);
    }
    case LeaseMessage::kReleased:
    case LeaseMessage::kPrepared:
      // A doorbell: the caller looks at the words after this.
      KVFERRY_TRY(lease::read_body<lease::LeaseBody>(incoming, "Released or Prepared"));
      return ok();
    case LeaseMessage::kBye: {
      KVFERRY_TRY(lease::read_body<lease::LeaseBody>(incoming, "Bye"));
      slot.wanted.reset();
      return lease::send(*slot.connection, LeaseMessage::kBye, lease::LeaseBody{slot.last_lease});
    }
    case LeaseMessage::kHello:
    case LeaseMessage::kWelcome:
    case LeaseMessage::kRefused:
    case LeaseMessage::kGrant:
    case LeaseMessage::kRevoke: break;
  }
  return KVFERRY_ERROR(kProtocol, "message {} is not an attacher's to send at this point",
                       static_cast<int>(incoming.message));
}

Status LeaseOwner::Impl::on_attach(Slot& slot, Epoch min_epoch) {
  if (min_epoch.value == 0) return KVFERRY_ERROR(kProtocol, "attach request for epoch 0");
  if (collect_words(slot) == lease::SlotTable::Release::kForged) {
    return KVFERRY_ERROR(kProtocol, "a word names a lease above {}, the last one granted",
                         slot.last_lease.value);
  }
  if (slot.lease) {
    return KVFERRY_ERROR(kProtocol, "attach request while lease {} on epoch {} is not released",
                         slot.lease->id.value, slot.lease->epoch.value);
  }
  slot.wanted = min_epoch;
  if ((phase() == LeasePhase::kReady || is_mutant("grant_while_revoking")) &&
      epoch() >= min_epoch && may_grant()) {
    grant(slot);
  } else {
    log_info("{}: {} waits for epoch {} or later; now epoch {} {}{}{}", tag_, slot.name(),
             min_epoch.value, epoch().value, to_string(phase()), held_up_.empty() ? "" : ", ",
             held_up_);
  }
  return ok();
}

void LeaseOwner::Impl::serve_parked() {
  bool waits = false;
  slots_.for_each([&](Slot& slot) {
    if (!slot.wanted || !slot.connection || phase() != LeasePhase::kReady ||
        epoch() < *slot.wanted) {
      return;
    }
    if (may_grant()) {
      grant(slot);
    } else {
      waits = true;
    }
  });
  if (!waits) held_up_.clear();
}

bool LeaseOwner::Impl::may_grant() {
  std::string reason = why_not_yet();
  if (reason != held_up_) {
    if (reason.empty()) {
      log_info("{}: epoch {} can be granted now; it was held up: {}", tag_, epoch().value,
               held_up_);
    } else {
      log_info("{}: epoch {} is not granted until that ends: {}", tag_, epoch().value, reason);
    }
    held_up_ = std::move(reason);
  }
  return held_up_.empty();
}

// Workers write to the arena and its contents outlive them. So a worker gets the epoch only when
// nothing of the one before can write to it any more: its lease has ended, and where the backend
// can tell, no child that it forked keeps it mapped.
std::string LeaseOwner::Impl::why_not_yet() {
  if (!is_mover()) return {};
  const std::vector<Slot*> holders = slots_.holding(epoch());
  if (!holders.empty()) return fmt::format("held by {}", lease::describe(holders));
  const lease::Deaths* deaths = slots_.deaths(epoch());
  if (deaths == nullptr) return {};
  const auto mapped = arena_->mapped_elsewhere();
  if (!mapped) return fmt::format("who maps it cannot be told: {}", mapped.error().message);
  if (mapped->empty()) return {};
  return fmt::format("process {} still maps it, a child of dead {}: end it, or clear and reinit",
                     lease::describe(*mapped), lease::describe(*deaths));
}

void LeaseOwner::Impl::grant(Slot& slot) {
  slot.wanted.reset();
  const lease::Lease lease = slots_.record_lease(slot, epoch());
  record(Transition::kOwnerRecord, slot, lease);
  bool left = false;
  Status sent = options_.transitions.attempt(
      Transition::kOwnerSend,
      {.session = session_, .epoch = lease.epoch, .lease = lease.id, .peer = slot.incarnation});
  if (sent) sent = send_grant(slot, lease, left);
  log_info("{}: lease {} on epoch {} granted to {}{}", tag_, lease.id.value, lease.epoch.value,
           slot.name(),
           mark_.state() == lease::PrepareMark::State::kPreparing ? ", which has to zero it" : "");
  if (left) record(Transition::kOwnerGranted, slot, lease);
  if (sent) return;
  if (!left) {
    record(Transition::kOwnerWithdraw, slot, lease);
    lease::SlotTable::withdraw_lease(slot);
    end_preparing(lease.id);
  }
  drop_connection(slot, sent.error());
}

// Descriptors of the grant are closed on return: held open they pin the memory.
Status LeaseOwner::Impl::send_grant(Slot& slot, const lease::Lease& lease, bool& left) {
  KVFERRY_ASSIGN(const std::vector<ExportedHandle> handles, arena_->export_handles());
  const std::optional<LeaseId> prepared = mark_.grant(lease.id);
  const auto total = static_cast<std::uint32_t>(handles.size());
  for (std::uint32_t first = 0; first < total; first += lease::kMaxHandlesPerPart) {
    lease::GrantBody part;
    part.epoch = lease.epoch;
    part.lease = lease.id;
    part.prepared = prepared;
    part.total = total;
    part.first = first;
    if (first == 0) part.layout = arena_->layout();
    std::vector<int> fds;
    const std::uint32_t end = std::min(total, first + lease::kMaxHandlesPerPart);
    for (std::uint32_t i = first; i < end; ++i) {
      const ExportedHandle& handle = handles[i];
      part.handles.push_back({handle.kind, handle.size_bytes, handle.token, handle.fd.valid()});
      if (handle.fd.valid()) fds.push_back(handle.fd.get());
    }
    KVFERRY_TRY(lease::send(*slot.connection, LeaseMessage::kGrant, part, fds));
    left = true;
  }
  return ok();
}

void LeaseOwner::Impl::on_death(const IncarnationId& incarnation) {
  Slot* slot = slots_.find(incarnation);
  KVFERRY_CHECK(slot != nullptr, "a death in an empty slot");
  loop_.unwatch(slot->process.pidfd());
  close_connection(*slot);
  const std::string name = slot->name();
  (void)collect_words(*slot);
  record(Transition::kOwnerSeesDeath, *slot, slot->lease.value_or(lease::Lease{}));
  log_info("{}: {} is dead{}", tag_, name,
           slot->lease ? fmt::format(": ends lease {} on epoch {}", slot->lease->id.value,
                                     slot->lease->epoch.value)
                       : std::string(", held no lease"));
  const std::optional<lease::Lease> held = slot->lease;
  slots_.remove_dead(incarnation);
  if (is_mutant("death_of_an_earlier_life")) {
    slots_.for_each([this](Slot& other) {
      if (!other.lease) return;
      record(Transition::kOwnerSeesDeath, other, *other.lease);
      other.lease.reset();
    });
  }
  if (held) end_preparing(held->id);
  tick();
}

void LeaseOwner::Impl::drop_connection(Slot& slot, const Error& why) {
  log_warn("{}: connection of {} dropped: {}", tag_, slot.name(), why.to_string());
  note(fmt::format("{} dropped: {}", slot.name(), why.to_string()));
  close_connection(slot);
}

void LeaseOwner::Impl::close_connection(Slot& slot) {
  slot.wanted.reset();
  if (!slot.connection) return;
  loop_.unwatch(slot.connection->fd());
  slot.connection.reset();
}

// Reads both words of an attacher. released was loaded first, so what it ended cannot hide that
// the epoch had been prepared before.
lease::SlotTable::Release LeaseOwner::Impl::collect_words(Slot& slot) {
  const std::optional<lease::Lease> held = slot.lease;
  const lease::SlotTable::Release release = lease::SlotTable::collect_release(slot);
  if (!held) return release;
  if (lease::SlotTable::prepared(slot) == held->id && mark_.acknowledge(held->id)) {
    log_info("{}: epoch {} was prepared by {} under lease {}", tag_, held->epoch.value, slot.name(),
             held->id.value);
  }
  if (!slot.lease) {
    record(Transition::kOwnerSeesRelease, slot, *held);
    end_preparing(held->id);
  }
  return release;
}

void LeaseOwner::Impl::end_preparing(LeaseId lease) {
  if (!mark_.ended(lease)) return;
  log_info("{}: lease {} ended before its holder had zeroed epoch {}: the next one begins anew",
           tag_, lease.value, epoch().value);
}

void LeaseOwner::Impl::collect_releases() {
  slots_.for_each([this](Slot& slot) {
    const std::optional<lease::Lease> held = slot.lease;
    switch (collect_words(slot)) {
      case lease::SlotTable::Release::kNone: break;
      case lease::SlotTable::Release::kEnded:
        log_info("{}: {} released lease {} on epoch {}", tag_, slot.name(), held->id.value,
                 held->epoch.value);
        break;
      case lease::SlotTable::Release::kForged:
        drop_connection(slot, KVFERRY_ERROR(kProtocol,
                                            "a word names a lease above {}, the last one granted; "
                                            "its leases end only with its death",
                                            slot.last_lease.value));
        break;
    }
  });
  const auto living = [this](Epoch epoch) { return !slots_.holding(epoch).empty(); };
  const auto died = [this](Epoch epoch) { return slots_.deaths(epoch) != nullptr; };
  if (quarantine_.empty()) return;
  for (const Epoch epoch : quarantine_.reap(living, died, arena_ ? &*arena_ : nullptr)) {
    slots_.forget_deaths(epoch);
  }
}

}  // namespace kvferry::ipc
