// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/client_requests.hpp"

#include "kvferry/ipc/model/block_key.hpp"
#include "manager/catalogue_format.hpp"
#include "manager/names.hpp"
#include "manager/store_room.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace kvferry::cache_manager {
namespace {

std::optional<ipc::Error> mismatch_of(const ClientRecord& client, const EngineRecord& engine) {
  const auto& config = engine.config();
  if (!config) {
    return std::nullopt;
  }
  if (config->geometry.ranks != client.ranks) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "engine {} runs on {} ranks, the client says {}: connect with its count",
                         engine.name(), config->geometry.ranks, client.ranks);
  }
  if (config->fingerprint != client.fingerprint) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "engine {} has geometry {} ({}), the client says {}: connect with its "
                         "fingerprint",
                         engine.name(), config->geometry.name, config->fingerprint.hex(),
                         client.fingerprint.hex());
  }
  return std::nullopt;
}

ipc::ModelIdentity identity_of(const ipc::EngineHello& hello) {
  ipc::ModelIdentity identity;
  identity.name_space = hello.name_space;
  identity.model = hello.model;
  identity.fingerprint = hello.fingerprint;
  identity.weights = hello.weights;
  identity.name_space_key = hello.name_space_key;
  identity.unit_blocks = hello.unit_blocks;
  return identity;
}

// The weights that its client names and those that its workers load: either may be what changes.
ipc::Digest root_of(ipc::ModelIdentity identity, const EngineRecord& engine) {
  identity.weights = ipc::combine_weights(std::array{identity.weights, engine.weights()});
  return identity.root();
}

PoolCatalogue::FoundRoot root_record(const ClientRecord& client, const EngineRecord& engine) {
  return {client.root, client.fingerprint, engine.name(), client.account->name(),
          client.account->proof()};
}

}  // namespace

template <typename T>
bool ClientRequests::take(const ClientRecord& client,
                          const ipc::Envelope& request,
                          const char* name,
                          T& out) {
  auto decoded = ipc::decode<T>(request.body, name);
  if (!decoded) {
    context_.refuse(client.peer, request, decoded.error());
    return false;
  }
  out = std::move(decoded).value();
  return true;
}

template <typename T>
bool ClientRequests::take_of_ready(const ClientRecord& client,
                                   const ipc::Envelope& request,
                                   const char* name,
                                   T& out) {
  if (!take(client, request, name, out)) {
    return false;
  }
  const ipc::Status status = check(client);
  if (!status) {
    context_.refuse(client.peer, request, status.error());
  }
  return status.has_value();
}

ipc::Status ClientRequests::check(const ClientRecord& client) {
  if (client.mismatch) {
    return *client.mismatch;
  }
  if (!client.engine->config()) {
    return KVFERRY_ERROR(kNotReady, "engine {} has no worker yet: wait until it is ready",
                         client.engine->name());
  }
  return ipc::ok();
}

bool ClientRequests::handle(const ipc::Peer& peer, const ipc::Envelope& request) {
  using Kind = ipc::MessageKind;
  const bool is_ours = request.kind >= Kind::kEngineHello && request.kind <= Kind::kDropSequence;
  const bool is_later_one = request.kind == Kind::kOfferStore || request.kind == Kind::kPinBlocks ||
                            request.kind == Kind::kUnpinBlocks;
  if (!is_ours && !is_later_one) {
    return false;
  }
  if (request.kind == Kind::kEngineHello) {
    hello(peer, request);
    return true;
  }
  const ClientRecord* client = context_.directory.client(peer.id);
  if (client == nullptr) {
    context_.refuse(peer, request,
                    KVFERRY_ERROR(kProtocol, "{} has not said an engine hello", peer.name));
    return true;
  }
  switch (request.kind) {
    case Kind::kLookup: lookup(*client, request); break;
    case Kind::kUsePrefix: use(*client, request); break;
    case Kind::kPin:
    case Kind::kUnpin: pin(*client, request); break;
    case Kind::kPinBlocks:
    case Kind::kUnpinBlocks: pin_blocks(*client, request); break;
    case Kind::kReserveStore: reserve(*client, request); break;
    case Kind::kAbandonStore: abandon(*client, request); break;
    case Kind::kSubmitStore: jobs_.submit_store(*client, request); break;
    case Kind::kOfferStore: jobs_.offer_store(*client, request); break;
    case Kind::kSubmitLoad: jobs_.submit_load(*client, request); break;
    case Kind::kCancel: cancel(*client, request); break;
    case Kind::kSwapOut: jobs_.swap_out(*client, request); break;
    case Kind::kSwapIn: jobs_.swap_in(*client, request); break;
    case Kind::kDropSequence: drop_sequence(*client, request); break;
    default: return false;
  }
  return true;
}

void ClientRequests::hello(const ipc::Peer& peer, const ipc::Envelope& request) {
  auto decoded = ipc::decode<ipc::EngineHello>(request.body, "EngineHello");
  if (!decoded) {
    context_.refuse(peer, request, decoded.error());
    return;
  }
  if (ipc::Status named = check_engine_name(decoded->engine); !named) {
    context_.refuse(peer, request, named.error());
    return;
  }
  EngineRecord& engine = context_.directory.open(decoded->engine);
  const ipc::Digest root = root_of(identity_of(*decoded), engine);
  ClientRecord client;
  client.peer = peer;
  client.engine = &engine;
  client.fingerprint = decoded->fingerprint;
  client.ranks = decoded->ranks;
  client.identity = identity_of(*decoded);
  client.root = root;
  client.schedules = decoded->schedules;
  if (const ipc::Status admitted = admit(*decoded, client); !admitted) {
    context_.refuse(peer, request, admitted.error());
    context_.drop_if_unused(decoded->engine);
    return;
  }
  if (const ClientRecord* before = context_.directory.client(peer.id)) {
    if (before->engine->name() != decoded->engine) {
      end_client(peer.id, /*with_sequences=*/true);
    } else if (before->root != root) {
      // Slots that were reserved for one identity must not be filled by another.
      context_.index.drop_client(peer.id);
    }
  }
  context_.directory.prune_roots(
      decoded->engine, [this](const ipc::Digest& used) { return context_.index.has_root(used); });
  context_.transitions.record(ipc::Transition::kManagerRegister, {.peer = peer.id});
  const bool schedules = client.schedules;
  context_.catalogue.note_root(root_record(client, engine));
  if (const ipc::ProcessRef* process = context_.server.process(peer.id)) {
    context_.catalogue.note_user(*process, peer.id, catalogue::UserKind::kEngine);
  }
  context_.directory.set_client(std::move(client));
  ipc::log_info("engine client {} (pid {}) joined engine {}, root of model {} in {}", peer.name,
                peer.pid, decoded->engine, decoded->model, decoded->name_space);
  // One that says hello again while it waits is answered once, for the last.
  const auto earlier =
      std::find_if(waiting_hellos_.begin(), waiting_hellos_.end(),
                   [&](const WaitingHello& waiting) { return waiting.peer.id == peer.id; });
  if (earlier != waiting_hellos_.end()) {
    context_.refuse(
        earlier->peer, earlier->request,
        KVFERRY_ERROR(kCancelled, "{} said hello again before this was answered", peer.name));
    waiting_hellos_.erase(earlier);
  }
  waiting_hellos_.push_back(
      {peer, request, engine.id(), schedules, decoded->paused, decoded->paused_by_release});
  answer_waiting_hellos();
}

// Nothing of the namespace is made for who is refused for another reason.
ipc::Status ClientRequests::admit(const ipc::EngineHello& hello, ClientRecord& client) {
  if (const auto mismatch = mismatch_of(client, *client.engine)) return *mismatch;
  if (hello.unit_blocks == 0 || hello.unit_blocks > ipc::kMostUnitBlocks) {
    return KVFERRY_ERROR(kInvalidArgument, "store units of {} blocks: give 1 to {}",
                         hello.unit_blocks, ipc::kMostUnitBlocks);
  }
  if (hello.unit_blocks > 1 &&
      std::uint64_t{hello.unit_blocks} * (hello.ranks + std::uint64_t{1}) > catalogue::kMostSums) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "store units of {} blocks on {} ranks: give at most {} for both together",
                         hello.unit_blocks, hello.ranks, catalogue::kMostSums);
  }
  if (hello.name_space_key && hello.name_space_key->is_zero()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the key of namespace {} is zero: give 128 random bits, or none",
                         hello.name_space);
  }
  NamespaceAccounts& accounts = context_.index.accounts();
  const auto has_clients = [&](const NamespaceAccount& account) {
    return context_.directory.has_client_of(account, {});
  };
  const auto has_others = [&](const NamespaceAccount& account) {
    return context_.directory.has_client_of(account, client.peer.id);
  };
  KVFERRY_ASSIGN(NamespaceAccount * account, accounts.open(hello.name_space, has_clients));
  KVFERRY_TRY(NamespaceAccounts::claim(*account, hello.name_space_key, has_others));
  client.account = account;
  return ipc::ok();
}

// Jobs of a client that is gone may still copy to or from the engine's blocks: whoever takes its
// place is greeted only when they are over, so that it never meets a copy that it does not know.
// Nor does anybody come into the middle of a flush or an update of weights.
void ClientRequests::answer_waiting_hellos() {
  std::vector<WaitingHello> left;
  for (WaitingHello& waiting : std::exchange(waiting_hellos_, {})) {
    const ClientRecord* client = context_.directory.client(waiting.peer.id);
    if (client == nullptr || client->engine->id() != waiting.engine) {
      continue;
    }
    if (client->mismatch) {
      context_.refuse(waiting.peer, waiting.request, *client->mismatch);
    } else if (context_.jobs.has_orphans(waiting.engine) ||
               holds_while_it_runs(client->engine->operation())) {
      left.push_back(std::move(waiting));
    } else {
      context_.reply(waiting.peer, waiting.request, client->view());
      if (waiting.schedules) {
        on_scheduler_(*client, waiting.paused, waiting.paused_by_release);
      }
      // State comes as events, the first one included: nothing may change for long after a hello.
      const ipc::Status sent =
          context_.server.notify(waiting.peer.id, ipc::MessageKind::kEngineState, client->view());
      if (!sent) {
        ipc::log_warn("engine state not sent to {}: {}", waiting.peer.name,
                      sent.error().to_string());
      }
    }
  }
  waiting_hellos_.insert(waiting_hellos_.end(), std::make_move_iterator(left.begin()),
                         std::make_move_iterator(left.end()));
}

void ClientRequests::compare_clients(const EngineRecord& engine) {
  for (ClientRecord* client : context_.directory.clients_of(engine)) {
    client->mismatch = mismatch_of(*client, engine);
    if (client->mismatch) {
      ipc::log_warn("client {}: {}", client->peer.name, client->mismatch->message);
    }
  }
}

void ClientRequests::on_weights(const EngineRecord& engine) {
  for (ClientRecord* client : context_.directory.clients_of(engine)) {
    const ipc::Digest root = root_of(client->identity, engine);
    if (root == client->root) {
      continue;
    }
    // Slots that were reserved for one identity must not be filled by another.
    context_.index.drop_client(client->peer.id);
    context_.directory.set_root(*client, root);
    context_.catalogue.note_root(root_record(*client, engine));
    context_.directory.prune_roots(
        engine.name(), [this](const ipc::Digest& used) { return context_.index.has_root(used); });
  }
}

void ClientRequests::end_client(const ipc::IncarnationId& peer, bool with_sequences) {
  context_.index.drop_client(peer);
  if (with_sequences) {
    context_.sequences.drop_owner(peer);
    context_.catalogue.forget_user(peer);
  }
  jobs_.fail_layers(peer);
  context_.jobs.orphan(peer);
  jobs_.forget_client(peer);
  if (EngineRecord* engine = context_.directory.remove_client(peer)) {
    const std::string name = engine->name();
    context_.drop_if_unused(name);
  }
}

void ClientRequests::lookup(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::Lookup message;
  if (!take_of_ready(client, request, "Lookup", message)) {
    return;
  }
  context_.reply(client.peer, request,
                 context_.index.lookup(client.root, message.blocks, client.rules()));
}

void ClientRequests::use(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::UsePrefix message;
  if (!take_of_ready(client, request, "UsePrefix", message)) {
    return;
  }
  context_.index.use(client.root, message.blocks,
                     static_cast<std::uint32_t>(client.engine->config()->rules.size()));
}

void ClientRequests::pin(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::PinRequest message;
  if (!take_of_ready(client, request, "PinRequest", message)) {
    return;
  }
  const auto groups = static_cast<std::uint32_t>(client.engine->config()->shapes.size());
  ipc::PinReply reply;
  reply.pinned = request.kind == ipc::MessageKind::kPin
                     ? context_.index.pin(client.peer.id, client.root, message.blocks, groups)
                     : context_.index.unpin(client.peer.id, client.root, message.blocks, groups);
  context_.reply(client.peer, request, reply);
}

void ClientRequests::pin_blocks(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::PinBlocks message;
  if (!take_of_ready(client, request, "PinBlocks", message)) {
    return;
  }
  PrefixIndex& index = context_.index;
  const bool pins = request.kind == ipc::MessageKind::kPinBlocks;
  const bool names_parts = pins || !message.parts.empty();
  if (names_parts && message.parts.size() != message.blocks.size()) {
    context_.refuse(
        client.peer, request,
        KVFERRY_ERROR(kInvalidArgument, "{} of {} blocks with parts of {}",
                      ipc::to_string(request.kind), message.blocks.size(), message.parts.size()));
    return;
  }
  ipc::PinBlocksReply reply;
  reply.done.reserve(message.blocks.size());
  for (std::size_t i = 0; i < message.blocks.size(); ++i) {
    const ipc::PinnedBlock& block = message.blocks[i];
    const ipc::BlockKey key{client.root, block.key, block.group};
    const std::uint64_t lacking = names_parts ? index.lacking(key, message.parts[i]) : 0;
    // A unit that is pinned stays as it is: what lacks a part now was not pinned for it before.
    const bool done =
        lacking == 0 && (pins ? index.pin(client.peer.id, key) : index.unpin(client.peer.id, key));
    reply.done.push_back(done ? 1 : 0);
    if (names_parts) reply.lacking.push_back(lacking);
  }
  context_.reply(client.peer, request, reply);
}

void ClientRequests::reserve(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::ReserveStore message;
  if (!take(client, request, "ReserveStore", message)) {
    return;
  }
  ipc::Status status = check(client);
  if (status && (context_.stopping || client.engine->phase() != ipc::CachePhase::kReady)) {
    status = KVFERRY_ERROR(kNotReady, "engine {} is {}: wait until it is ready",
                           client.engine->name(), to_string(client.engine->phase()));
  }
  if (status) {
    status = check_store_keys(client, message.weights, message.keys);
  }
  if (!status) {
    context_.refuse(client.peer, request, status.error());
    return;
  }
  ipc::ReserveStoreReply reply;
  reply.slots = reserve_keys(context_.index, client, message.keys);
  if (request.request.value == 0) {
    // Nobody would ever learn the slots.
    for (const ipc::ReservedSlot& slot : reply.slots) {
      context_.index.discard(slot.slot);
    }
    return;
  }
  context_.reply(client.peer, request, reply);
}

void ClientRequests::abandon(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::AbandonStore message;
  if (!take(client, request, "AbandonStore", message)) {
    return;
  }
  for (const std::uint64_t slot : message.slots) {
    if (context_.index.reservation(client.peer.id, slot) != nullptr) {
      context_.index.discard(slot);
    }
  }
  context_.reply(client.peer, request, ipc::Empty{});
}

void ClientRequests::cancel(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::CancelJob message;
  if (!take(client, request, "CancelJob", message)) {
    return;
  }
  jobs_.cancel(client, message.job);
  context_.reply(client.peer, request, ipc::Empty{});
}

void ClientRequests::drop_sequence(const ClientRecord& client, const ipc::Envelope& request) {
  ipc::DropSequence message;
  if (!take(client, request, "DropSequence", message)) {
    return;
  }
  if (!context_.sequences.drop({client.engine->id(), client.peer.id, message.sequence})) {
    context_.refuse(
        client.peer, request,
        KVFERRY_ERROR(kNotFound, "client {} of engine {} has no swapped-out sequence {}",
                      client.peer.name, client.engine->name(), message.sequence));
    return;
  }
  context_.reply(client.peer, request, ipc::Empty{});
}

}  // namespace kvferry::cache_manager
