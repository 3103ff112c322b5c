// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/engine_state.hpp"
#include "manager/namespace_accounts.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// An engine's client: whose blocks it may find, and on which engine it works.
struct ClientRecord {
  ipc::Peer peer;
  EngineRecord* engine = nullptr;
  ipc::ModelIdentity identity;  ///< As the client says it.
  ipc::Digest root;             ///< Of that, with the weights of the engine's workers.
  ipc::Digest fingerprint;
  std::uint32_t ranks = 0;
  bool schedules = false;  ///< Obeys pauses and flushes.
  /// The workers that registered after the client have another geometry: its requests are refused.
  std::optional<ipc::Error> mismatch;
  NamespaceAccount* account = nullptr;  ///< Of its namespace. Never null once it is here.

  /// Of what it stores under keys. @pre the engine has a geometry with that group
  [[nodiscard]] SlabShape shape(ipc::GroupId group) const {
    return engine->config()->shapes[group.value].in_units(identity.unit_blocks);
  }
  /// Of its prefixes. @pre the engine has a geometry
  [[nodiscard]] std::vector<ipc::GroupRule> rules() const {
    return ipc::rules_in_units(engine->config()->rules, identity.unit_blocks);
  }
  /// What it is told of its engine.
  [[nodiscard]] ipc::EngineState view() const {
    ipc::EngineState state = engine->view();
    state.root = root;
    state.rules = ipc::rules_in_units(std::move(state.rules), identity.unit_blocks);
    return state;
  }
};

/// Is told under which roots an engine's clients look for blocks.
class RootObserver {
 public:
  virtual ~RootObserver() = default;
  /// The client's engine uses the client's root: again, or for the first time.
  virtual void root_used(const ClientRecord& client) = 0;
  /// No client of the engine uses it now, and the last that did has another one since; or nothing
  /// is stored under it any more.
  virtual void root_left(const std::string& engine, const ipc::Digest& root) = 0;
};

/// Who is connected, and to which engine everybody belongs. @threading one thread.
class EngineDirectory {
 public:
  EngineDirectory();

  /// From now on; null: nobody. It outlives the directory, or is taken away before it ends.
  void observe(RootObserver* observer) noexcept { observer_ = observer; }

  void add_peer(const ipc::Peer& peer);
  void remove_peer(const ipc::IncarnationId& peer);
  [[nodiscard]] bool is_living(const ipc::IncarnationId& peer) const {
    return peers_.contains(peer);
  }
  [[nodiscard]] const std::map<ipc::IncarnationId, ipc::Peer>& peers() const noexcept {
    return peers_;
  }

  /// The engine of that name, made when there is none.
  [[nodiscard]] EngineRecord& open(const std::string& name);
  [[nodiscard]] EngineRecord* find(const std::string& name);
  [[nodiscard]] EngineRecord* find(std::uint32_t id);
  [[nodiscard]] const std::map<std::string, std::unique_ptr<EngineRecord>>& engines()
      const noexcept {
    return engines_;
  }
  /// Forgets the engine when nobody belongs to it and no operation runs on it.
  bool drop_if_unused(const std::string& name);

  /// The engine that a worker or mover registered with; null before its hello.
  [[nodiscard]] EngineRecord* engine_of(const ipc::IncarnationId& rank_peer);
  void bind(const ipc::IncarnationId& rank_peer, EngineRecord& engine);

  [[nodiscard]] ClientRecord* client(const ipc::IncarnationId& peer);
  ClientRecord& set_client(ClientRecord record);
  void set_root(ClientRecord& client, const ipc::Digest& root);
  /// A client other than that one is of the namespace.
  [[nodiscard]] bool has_client_of(const NamespaceAccount& account,
                                   const ipc::IncarnationId& but) const;
  /// The engine that the client worked on; null when it had none.
  EngineRecord* remove_client(const ipc::IncarnationId& peer);
  [[nodiscard]] std::vector<ClientRecord*> clients_of(const EngineRecord& engine);

  /// Model roots that clients of an engine have used and that may still hold blocks, with their
  /// fingerprints. They outlive the engine's record: a clear must find them after everybody has
  /// restarted.
  [[nodiscard]] const std::map<ipc::Digest, ipc::Digest>& roots(const std::string& engine);
  /// Of an engine that an earlier manager knew.
  void adopt_root(const std::string& engine,
                  const ipc::Digest& root,
                  const ipc::Digest& fingerprint) {
    roots_[engine].emplace(root, fingerprint);
  }
  /// Names of engines that have roots and no record.
  [[nodiscard]] std::vector<std::string> departed() const;
  /// Whether a living engine other than this one has used the root and may do so again.
  [[nodiscard]] bool shares_root(const ipc::Digest& root, const EngineRecord& engine) const;
  void prune_roots(const std::string& engine, const std::function<bool(const ipc::Digest&)>& used);

  /// The next generation of any engine; never repeated, not by a restarted manager either.
  [[nodiscard]] std::uint64_t& next_generation() noexcept { return next_generation_; }

 private:
  void tell_root(const ClientRecord& client, const ipc::Digest& before);

  std::uint64_t next_generation_;
  std::map<ipc::IncarnationId, ipc::Peer> peers_;
  std::map<std::string, std::unique_ptr<EngineRecord>> engines_;
  std::unordered_map<ipc::IncarnationId, EngineRecord*> rank_peers_;
  std::map<ipc::IncarnationId, ClientRecord> clients_;
  std::map<std::string, std::map<ipc::Digest, ipc::Digest>> roots_;
  std::uint32_t next_engine_ = 1;
  RootObserver* observer_ = nullptr;
};

}  // namespace kvferry::cache_manager
