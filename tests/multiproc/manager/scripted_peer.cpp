// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/scripted_peer.hpp"

#include <poll.h>

#include <algorithm>

namespace kvferry::test {

ipc::Geometry tiny_geometry(std::uint32_t ranks) {
  ipc::RegionSpec key;
  key.kind = ipc::RegionKind::kKey;
  key.block_bytes = 4096;
  ipc::RegionSpec value = key;
  value.kind = ipc::RegionKind::kValue;
  ipc::RegionSpec state = key;
  state.kind = ipc::RegionKind::kState;
  state.block_bytes = 1024;
  ipc::GroupSpec main;
  main.name = "main";
  main.regions = {key, value};
  ipc::GroupSpec last;
  last.name = "state";
  last.rule = ipc::HitRule::kLastState;
  last.regions = {state};
  ipc::Geometry geometry;
  geometry.name = "tiny";
  geometry.tokens_per_block = 16;
  geometry.ranks = ranks;
  geometry.groups = {main, last};
  return geometry;
}

ScriptedPeer::ScriptedPeer(const std::string& runtime_dir,
                           ipc::ProcessKind kind,
                           std::string name,
                           const ipc::IncarnationId& id)
    : id_(id), kind_(kind) {
  auto dir = ipc::RuntimeDir::open(runtime_dir, "default");
  if (!dir) {
    throw ipc::Exception(dir.error());
  }
  ipc::ControlLink::Options options;
  options.registry_path = dir->registry_socket();
  options.control_path = dir->control_socket();
  options.kind = kind;
  options.incarnation = id_;
  options.name = std::move(name);
  auto link = ipc::ControlLink::connect(options, ipc::Deadline::after(std::chrono::seconds(20)));
  if (!link) {
    throw ipc::Exception(link.error());
  }
  link_ = std::move(link).value();
}

ipc::Result<ipc::Empty> ScriptedPeer::rank_hello(std::uint32_t rank,
                                                 const ipc::Geometry& geometry,
                                                 ipc::CacheOwner owner,
                                                 const std::string& engine,
                                                 const std::string& link) {
  ipc::RankHello hello;
  hello.engine = engine;
  hello.rank = ipc::Rank{rank};
  hello.kind = kind_;
  hello.cache_owner = owner;
  hello.geometry = geometry;
  hello.device = "host";
  hello.link = link;
  return call<ipc::Empty>(ipc::MessageKind::kRankHello, hello);
}

ipc::RankState ScriptedPeer::mapped_state(std::uint32_t rank, std::uint64_t epoch) {
  ipc::RankState state;
  state.session = session_of(rank);
  state.epoch = ipc::Epoch{epoch};
  state.phase = ipc::LeasePhase::kReady;
  state.mapped = true;
  state.group_blocks = {kTinyBlocks, kTinyBlocks};
  return state;
}

void ScriptedPeer::report_mapped(std::uint32_t rank, std::uint64_t epoch) {
  notify(ipc::MessageKind::kRankState, mapped_state(rank, epoch));
}

void ScriptedPeer::report_cleared(std::uint32_t rank, std::uint64_t epoch) {
  ipc::RankState state;
  state.session = session_of(rank);
  state.epoch = ipc::Epoch{epoch};
  state.phase = ipc::LeasePhase::kCleared;
  notify(ipc::MessageKind::kRankState, state);
}

void ScriptedPeer::finish(const ipc::MoverJob& job, ipc::ErrorCode* error) {
  ipc::MoverJobDone done;
  done.job = job.job;
  done.results.assign(job.items.size(), error == nullptr ? 0 : static_cast<std::uint8_t>(*error));
  done.message = error == nullptr ? "" : "the scripted mover says no";
  done.bytes = 4096 * job.items.size();
  notify(ipc::MessageKind::kMoverJobDone, done);
}

void ScriptedPeer::reply_error(const ipc::Envelope& request, ipc::Error error) {
  ipc::Envelope envelope;
  envelope.kind = request.kind;
  envelope.request = request.request;
  envelope.is_reply = true;
  envelope.error = std::move(error);
  send(envelope);
}

void ScriptedPeer::send(const ipc::Envelope& envelope) {
  if (ipc::Status sent = link_->send(envelope); !sent) {
    throw ipc::Exception(sent.error());
  }
}

void ScriptedPeer::take_arrived() {
  while (true) {
    auto received = link_->try_receive();
    if (!received || !received->has_value()) {
      return;
    }
    kept_.push_back(std::move(**received));
  }
}

std::optional<ipc::Envelope> ScriptedPeer::take_kept(ipc::MessageKind kind) {
  const auto at = std::find_if(kept_.begin(), kept_.end(), [kind](const ipc::Envelope& envelope) {
    return envelope.kind == kind;
  });
  if (at == kept_.end()) {
    return std::nullopt;
  }
  ipc::Envelope envelope = std::move(*at);
  kept_.erase(at);
  return envelope;
}

std::optional<ipc::Envelope> ScriptedPeer::next(ipc::MessageKind kind, ipc::Deadline deadline) {
  while (true) {
    take_arrived();
    if (auto envelope = take_kept(kind)) {
      return envelope;
    }
    if (link_->server_lost() || deadline.expired()) {
      take_arrived();  // What came between the last look and the end.
      return take_kept(kind);
    }
    pollfd entry{link_->fd(), POLLIN, 0};
    ::poll(&entry, 1, deadline.poll_timeout_ms());
  }
}

bool ScriptedPeer::has(ipc::MessageKind kind) {
  // Any answer will do, a refusal too: the manager answers each peer in order.
  (void)call<ipc::Empty>(ipc::MessageKind::kStatus, ipc::Empty{});
  take_arrived();
  return std::any_of(kept_.begin(), kept_.end(),
                     [kind](const ipc::Envelope& envelope) { return envelope.kind == kind; });
}

}  // namespace kvferry::test
