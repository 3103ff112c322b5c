// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/engine_directory.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

namespace kvferry::cache_manager {

namespace {

// Generations grow over manager restarts, too, so they start at a clock. Not at the wall clock,
// which may be set back: at the time since the machine started, which nobody who knows a generation
// outlives.
std::uint64_t first_generation() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  constexpr std::uint64_t kMicro = 1'000'000;
  return static_cast<std::uint64_t>(now.tv_sec) * kMicro +
         static_cast<std::uint64_t>(now.tv_nsec) / 1000 + 1;
}

}  // namespace

EngineDirectory::EngineDirectory() : next_generation_(first_generation()) {}

void EngineDirectory::add_peer(const ipc::Peer& peer) { peers_.insert_or_assign(peer.id, peer); }

void EngineDirectory::remove_peer(const ipc::IncarnationId& peer) {
  peers_.erase(peer);
  rank_peers_.erase(peer);
}

EngineRecord& EngineDirectory::open(const std::string& name) {
  std::unique_ptr<EngineRecord>& engine = engines_[name];
  if (engine == nullptr) {
    engine = std::make_unique<EngineRecord>(name, next_engine_++);
    (void)engine->refresh(next_generation_);
  }
  return *engine;
}

EngineRecord* EngineDirectory::find(const std::string& name) {
  const auto at = engines_.find(name);
  return at == engines_.end() ? nullptr : at->second.get();
}

EngineRecord* EngineDirectory::find(std::uint32_t id) {
  for (const auto& [name, engine] : engines_) {
    if (engine->id() == id) {
      return engine.get();
    }
  }
  return nullptr;
}

bool EngineDirectory::drop_if_unused(const std::string& name) {
  const auto at = engines_.find(name);
  if (at == engines_.end() || at->second->has_rank_peers() ||
      at->second->operation() != EngineOperation::kNone || !clients_of(*at->second).empty()) {
    return false;
  }
  std::erase_if(rank_peers_, [&](const auto& bound) { return bound.second == at->second.get(); });
  engines_.erase(at);
  return true;
}

EngineRecord* EngineDirectory::engine_of(const ipc::IncarnationId& rank_peer) {
  const auto at = rank_peers_.find(rank_peer);
  return at == rank_peers_.end() ? nullptr : at->second;
}

void EngineDirectory::bind(const ipc::IncarnationId& rank_peer, EngineRecord& engine) {
  rank_peers_.insert_or_assign(rank_peer, &engine);
}

ClientRecord* EngineDirectory::client(const ipc::IncarnationId& peer) {
  const auto at = clients_.find(peer);
  return at == clients_.end() ? nullptr : &at->second;
}

void EngineDirectory::set_root(ClientRecord& client, const ipc::Digest& root) {
  const ipc::Digest before = std::exchange(client.root, root);
  roots_[client.engine->name()].emplace(root, client.fingerprint);
  tell_root(client, before);
}

/// @param before its root until now, or the same
void EngineDirectory::tell_root(const ClientRecord& client, const ipc::Digest& before) {
  if (observer_ == nullptr) return;
  const bool is_used = std::any_of(clients_.begin(), clients_.end(), [&](const auto& other) {
    return other.second.engine == client.engine && other.second.root == before;
  });
  if (!is_used) observer_->root_left(client.engine->name(), before);
  observer_->root_used(client);
}

ClientRecord& EngineDirectory::set_client(ClientRecord record) {
  roots_[record.engine->name()].emplace(record.root, record.fingerprint);
  const ipc::IncarnationId id = record.peer.id;
  const ClientRecord* known = client(id);
  const bool is_known = known != nullptr && known->engine == record.engine;
  const ipc::Digest before = is_known ? known->root : record.root;
  ClientRecord& kept = clients_.insert_or_assign(id, std::move(record)).first->second;
  tell_root(kept, before);
  return kept;
}

bool EngineDirectory::has_client_of(const NamespaceAccount& account,
                                    const ipc::IncarnationId& but) const {
  return std::any_of(clients_.begin(), clients_.end(), [&](const auto& client) {
    return client.second.account == &account && client.first != but;
  });
}

EngineRecord* EngineDirectory::remove_client(const ipc::IncarnationId& peer) {
  const auto node = clients_.extract(peer);
  return node.empty() ? nullptr : node.mapped().engine;
}

std::vector<ClientRecord*> EngineDirectory::clients_of(const EngineRecord& engine) {
  std::vector<ClientRecord*> found;
  for (auto& [id, client] : clients_) {
    if (client.engine == &engine) {
      found.push_back(&client);
    }
  }
  return found;
}

const std::map<ipc::Digest, ipc::Digest>& EngineDirectory::roots(const std::string& engine) {
  return roots_[engine];
}

std::vector<std::string> EngineDirectory::departed() const {
  std::vector<std::string> names;
  for (const auto& [name, roots] : roots_) {
    if (!roots.empty() && !engines_.contains(name)) {
      names.push_back(name);
    }
  }
  return names;
}

bool EngineDirectory::shares_root(const ipc::Digest& root, const EngineRecord& engine) const {
  return std::any_of(roots_.begin(), roots_.end(), [&](const auto& used) {
    const auto record = engines_.find(used.first);
    const auto at = used.second.find(root);
    if (record == engines_.end() || record->second.get() == &engine || at == used.second.end()) {
      return false;
    }
    const auto& config = record->second->config();
    return !config || config->fingerprint == at->second;
  });
}

void EngineDirectory::prune_roots(const std::string& engine,
                                  const std::function<bool(const ipc::Digest&)>& used) {
  const auto at = roots_.find(engine);
  if (at == roots_.end()) {
    return;
  }
  std::erase_if(at->second, [&](const auto& item) {
    const ipc::Digest& root = item.first;
    const bool is_unused =
        !used(root) && std::none_of(clients_.begin(), clients_.end(),
                                    [&](const auto& client) { return client.second.root == root; });
    if (is_unused && observer_ != nullptr) observer_->root_left(engine, root);
    return is_unused;
  });
  if (at->second.empty()) {
    roots_.erase(at);
  }
}

}  // namespace kvferry::cache_manager
