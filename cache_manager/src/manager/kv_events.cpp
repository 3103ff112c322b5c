// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/kv_events.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

// A tenth of a millisecond or two.
constexpr std::size_t kSlicePlaces = 1024;

ipc::KvEventPublisher::Options publisher_options(const ManagerConfig& config,
                                                 const ipc::SessionId& session) {
  ipc::KvEventPublisher::Options options;
  options.endpoint = config.kv_events;
  options.snapshot_endpoint = config.kv_events_snapshot;
  options.life = session;
  return options;
}

}  // namespace

KvEvents::KvEvents(ipc::EventLoop& loop,
                   EngineDirectory& directory,
                   PrefixIndex& index,
                   const ManagerConfig& config,
                   const ipc::SessionId& session)
    : loop_(loop),
      directory_(directory),
      index_(index),
      encoding_(config.kv_events_encoding),
      publisher_(loop, publisher_options(config, session), *this) {
  index_.add_observer(*this);
  directory_.observe(this);
  ipc::log_info("KV events are told at {}{}{}", publisher_.endpoint(),
                publisher_.snapshot_endpoint().empty() ? "" : ", snapshots at ",
                publisher_.snapshot_endpoint());
}

KvEvents::~KvEvents() {
  index_.remove_observer(*this);
  directory_.observe(nullptr);
  loop_.cancel(tell_timer_);
  loop_.cancel(join_timer_);
}

KvEvents::Root* KvEvents::find(const ipc::Digest& root) {
  const auto at = roots_.find(root);
  return at == roots_.end() ? nullptr : &at->second;
}

// The fingerprint is part of the root, so all its engines have one geometry. They may have none yet
// when the root is used first.
const KvGroups& KvEvents::groups_of(Root& root) {
  static const KvGroups kUnknown;
  for (const Topic& topic : root.topics) {
    if (root.groups) break;
    const EngineRecord* engine = directory_.find(topic.engine);
    if (engine != nullptr && engine->config()) {
      root.groups = KvGroups::of(engine->config()->geometry, root.unit_blocks);
    }
  }
  return root.groups ? *root.groups : kUnknown;
}

// ---- what the index says ----

void KvEvents::stored(const ipc::BlockKey& key, const ipc::Digest& before) {
  Root* root = find(key.root);
  if (root == nullptr) return;
  tell_soon(key.root, *root);
  root->pending.stored(key.block, before, key.group, groups_of(*root));
}

void KvEvents::removed(const ipc::BlockKey& key) {
  Root* root = find(key.root);
  if (root == nullptr) return;
  tell_soon(key.root, *root);
  root->pending.removed(key.block, key.group);
}

void KvEvents::emptied(const ipc::Digest& root) {
  Root* known = find(root);
  if (known == nullptr) return;
  tell_soon(root, *known);
  known->pending.cleared();
}

// ---- what is told ----

// At the end of this turn of the loop.
void KvEvents::tell_soon(const ipc::Digest& root, const Root& known) {
  if (!known.pending.empty()) return;
  changed_.push_back(root);
  if (tell_timer_ != 0) return;
  tell_timer_ = loop_.at(ipc::MonotonicClock::now(), [this] {
    tell_timer_ = 0;
    tell();
  });
}

void KvEvents::tell() {
  for (const ipc::Digest& root : std::exchange(changed_, {})) {
    if (Root* known = find(root)) tell(*known);
  }
}

void KvEvents::tell(Root& root) {
  for (const ipc::KvEventBatch& batch : root.pending.take()) {
    const ipc::Bytes bytes = ipc::encode_kv_events(batch, encoding_);
    for (const Topic& topic : root.topics) {
      publisher_.publish(topic.text, bytes, batch.events.size());
    }
  }
}

void KvEvents::publish(const std::string& topic, KvEventRuns& runs) {
  for (const ipc::KvEventBatch& batch : runs.take()) {
    publisher_.publish(topic, ipc::encode_kv_events(batch, encoding_), batch.events.size());
  }
}

// ---- whom it is told ----

// Blocks of a namespace with a key are nobody else's to know: not by hashes, which whoever knows
// the tokens can compute.
void KvEvents::root_used(const ClientRecord& client) {
  if (client.identity.name_space_key) return;
  Root& root = roots_[client.root];
  root.unit_blocks = client.identity.unit_blocks;
  const std::string& engine = client.engine->name();
  if (std::any_of(root.topics.begin(), root.topics.end(),
                  [&](const Topic& topic) { return topic.engine == engine; })) {
    return;
  }
  // What came before is in what it is told first.
  tell(root);
  const ipc::KvTopic topic{engine, client.identity.name_space, client.root, client.identity.model};
  root.topics.push_back({engine, topic.text()});
  if (!index_.has_root(client.root)) return;
  joining_.push_back({client.root, root.topics.back().text});
  join_soon();
}

void KvEvents::root_left(const std::string& engine, const ipc::Digest& root) {
  Root* known = find(root);
  if (known == nullptr) return;
  const auto topic = std::find_if(known->topics.begin(), known->topics.end(),
                                  [&](const Topic& one) { return one.engine == engine; });
  if (topic == known->topics.end()) return;
  tell(*known);
  if (index_.has_root(root)) {
    KvEventRuns end;
    end.cleared();
    publish(topic->text, end);
  }
  std::erase_if(joining_, [&](const Joining& one) { return one.topic == topic->text; });
  known->topics.erase(topic);
  if (known->topics.empty()) roots_.erase(root);
}

void KvEvents::join_soon() {
  if (join_timer_ != 0 || joining_.empty()) return;
  join_timer_ = loop_.at(ipc::MonotonicClock::now(), [this] {
    join_timer_ = 0;
    join();
    join_soon();
  });
}

void KvEvents::join() {
  if (joining_.empty()) return;
  Joining& joining = joining_.front();
  Root* root = find(joining.root);
  if (root == nullptr) {
    joining_.pop_front();
    return;
  }
  KvEventRuns found;
  const KvGroups& groups = groups_of(*root);
  joining.from = index_.visit_visible(joining.from, kSlicePlaces,
                                      [&](const ipc::BlockKey& key, const ipc::Digest& before) {
                                        if (key.root != joining.root) return;
                                        found.stored(key.block, before, key.group, groups);
                                      });
  publish(joining.topic, found);
  if (joining.from == 0) joining_.pop_front();
}

ipc::KvSnapshotSource::Slice KvEvents::slice(std::uint64_t from) {
  std::unordered_map<ipc::Digest, KvEventRuns> found;
  const std::size_t next = index_.visit_visible(
      from, kSlicePlaces, [&](const ipc::BlockKey& key, const ipc::Digest& before) {
        Root* root = find(key.root);
        if (root == nullptr) return;
        found[key.root].stored(key.block, before, key.group, groups_of(*root));
      });
  Slice slice;
  if (next != 0) slice.next = next;
  for (auto& [root, runs] : found) {
    for (const ipc::KvEventBatch& batch : runs.take()) {
      const ipc::Bytes bytes = ipc::encode_kv_events(batch, encoding_);
      for (const Topic& topic : find(root)->topics) slice.parts.push_back({topic.text, bytes});
    }
  }
  return slice;
}

}  // namespace kvferry::cache_manager
