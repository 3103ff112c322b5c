// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/host_tier.hpp"

#include "kvferry/ipc/base/log.hpp"

namespace kvferry::cache_manager {

std::uint64_t HostTier::drop_prefixes(const EngineRecord& engine) {
  std::set<ipc::IncarnationId> own;
  for (const ClientRecord* client : directory_.clients_of(engine)) {
    own.insert(client->peer.id);
  }
  return drop(engine.name(), own);
}

std::uint64_t HostTier::drop_departed(const std::string& engine) {
  const std::uint64_t dropped = drop(engine, {});
  directory_.prune_roots(engine, [this](const ipc::Digest& root) { return index_.has_root(root); });
  return dropped;
}

std::uint64_t HostTier::drop(const std::string& engine, const std::set<ipc::IncarnationId>& own) {
  std::uint64_t dropped = 0;
  for (const auto& [root, fingerprint] : directory_.roots(engine)) {
    // Foreign: a living client of another engine that shares the model. Jobs of clients that are
    // gone count as ours.
    dropped += index_.drop_root(root, [&](const ipc::IncarnationId& client) {
      return !own.contains(client) && directory_.client(client) != nullptr;
    });
  }
  return dropped;
}

void HostTier::drop_other_geometries(const EngineRecord& engine) {
  const ipc::Digest& current = engine.config()->fingerprint;
  std::uint64_t blocks = 0;
  for (const auto& [root, fingerprint] : directory_.roots(engine.name())) {
    if (fingerprint != current && !directory_.shares_root(root, engine)) {
      blocks += index_.drop_root(root, [](const ipc::IncarnationId&) { return false; });
    }
  }
  const std::size_t sequences = sequences_.drop_other_geometries(engine.id(), current);
  if (blocks != 0 || sequences != 0) {
    ipc::log_info("engine {}: {} host blocks and {} sequences of another geometry dropped, now {}",
                  engine.name(), blocks, sequences, current.hex());
  }
}

}  // namespace kvferry::cache_manager
