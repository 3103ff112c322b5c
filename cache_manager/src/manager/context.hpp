// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "manager/adoption_stats.hpp"
#include "manager/engine_directory.hpp"
#include "manager/host_tier.hpp"
#include "manager/job_table.hpp"
#include "manager/peer_calls.hpp"
#include "manager/pool_catalogue.hpp"
#include "manager/prefix_index.hpp"
#include "manager/sequence_store.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvferry::cache_manager {

class EvictAhead;
class KvEvents;
class PoolAdoption;

/// Of host blocks, since the manager started.
struct IntegrityStats {
  std::uint64_t summed = 0;   ///< Got their checksums.
  std::uint64_t checked = 0;  ///< Loads of blocks that were checked,
  std::uint64_t corrupt = 0;  ///< and what of those was damaged.
  /// Were to be checked, and had no checksum. Only where all are: they were not loaded.
  std::uint64_t unchecked = 0;
};

/// What the parts of the manager share; ManagerCore owns all of it. @threading the loop's thread.
struct ManagerContext {
  const ManagerConfig& config;
  const ipc::RuntimeDir& dir;
  ipc::EventLoop& loop;
  ipc::ControlServer& server;
  PeerCalls& calls;
  EngineDirectory& directory;
  HostPool& pool;
  PoolCatalogue& catalogue;  ///< Of the pool, for the next manager.
  PrefixIndex& index;
  SequenceStore& sequences;
  HostTier& host;
  JobTable& jobs;
  const ipc::TransitionLog& transitions;
  /// To be called after anything about an engine's ranks or operation changed: derives its state,
  /// tells its clients, sends or ends its queued jobs.
  std::function<void(EngineRecord&)> engine_changed;
  /// Posted after an operation has ended: somebody may have waited for it.
  std::function<void()> operation_ended;
  ipc::LeaseId operations =
      {};  ///< Clears and re-inits that have begun, for the transitions' record.
  std::optional<AdoptionStats> adopted{};  ///< When the pool is an earlier manager's.
  PoolAdoption* adoption = nullptr;        ///< Null: there is none.
  IntegrityStats integrity{};
  const KvEvents* kv_events = nullptr;  ///< Null: they are told to nobody.
  const EvictAhead* ahead = nullptr;
  bool stopping = false;
  std::uint64_t protocol_errors = 0;  ///< Messages that were well-formed and wrong.

  /// Answers a request; events (no request id) are not answered.
  template <typename T>
  void reply(const ipc::Peer& peer, const ipc::Envelope& request, const T& body) const {
    if (request.request.value != 0) {
      log_unsent(peer, server.reply(peer.id, request, body));
    }
  }
  void refuse(const ipc::Peer& peer, const ipc::Envelope& request, ipc::Error error) const {
    ipc::log_debug("{}: message {} refused: {}", peer.name, static_cast<int>(request.kind),
                   error.to_string());
    if (request.request.value != 0) {
      log_unsent(peer, server.reply_error(peer.id, request, std::move(error)));
    }
  }
  /// Refuses what a well-behaved peer never says.
  void refuse_misuse(const ipc::Peer& peer, const ipc::Envelope& envelope, ipc::Error error) {
    ++protocol_errors;
    ipc::log_warn("{} (pid {}): {}", peer.name, peer.pid, error.to_string());
    refuse(peer, envelope, std::move(error));
  }
  /// Forgets an engine that nobody belongs to any more, once its jobs are over, too. A client that
  /// only lost its connection comes back for its sequences.
  void drop_if_unused(const std::string& name) const {
    const EngineRecord* engine = directory.find(name);
    if (engine == nullptr || jobs.unfinished(engine->id()) > 0 ||
        sequences.has_engine(engine->id())) {
      return;
    }
    const std::uint32_t id = engine->id();
    if (directory.drop_if_unused(name)) {
      jobs.forget_engine(id);
      ipc::log_info("engine {}: nobody is left, forgotten", name);
    }
  }
  static void log_unsent(const ipc::Peer& peer, const ipc::Status& status) {
    if (!status) {
      ipc::log_debug("no answer to {}: {}", peer.name, status.error().to_string());
    }
  }
};

}  // namespace kvferry::cache_manager
