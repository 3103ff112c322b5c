// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/kv_event_publisher.hpp"
#include "manager/engine_directory.hpp"
#include "manager/kv_event_runs.hpp"
#include "manager/prefix_index.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::cache_manager {

/// Tells what the prefix index stores and removes, in one batch for each root and turn of the loop,
/// and to each engine that uses the root on a topic of its own.
///
/// A topic is there while its engine may look for blocks under its root. An engine that comes to a
/// root under which others have stored is told all of that, in slices, as live events. One whose
/// weights are others now cannot find what it stored under the old ones: that topic is cleared, and
/// told anew should it come back. Both are right beside what happens meanwhile, by the argument in
/// kv_event_publisher.hpp.
/// @threading the loop's thread. @lifetime loop, directory and index outlive it.
class KvEvents : private PrefixObserver, private RootObserver, private ipc::KvSnapshotSource {
 public:
  /// Throws Exception: another process has an endpoint.
  KvEvents(ipc::EventLoop& loop,
           EngineDirectory& directory,
           PrefixIndex& index,
           const ManagerConfig& config,
           const ipc::SessionId& session);
  KvEvents(const KvEvents&) = delete;
  KvEvents& operator=(const KvEvents&) = delete;
  ~KvEvents() override;

  [[nodiscard]] const ipc::KvEventPublisher& publisher() const noexcept { return publisher_; }

 private:
  struct Topic {
    std::string engine;
    std::string text;
  };
  struct Root {
    std::vector<Topic> topics;  ///< At least one.
    std::uint32_t unit_blocks = 1;
    std::optional<KvGroups> groups;
    KvEventRuns pending;
  };
  /// A topic that is told what was stored before it.
  struct Joining {
    ipc::Digest root;
    std::string topic;
    std::size_t from = 0;
  };

  void stored(const ipc::BlockKey& key, const ipc::Digest& before) override;
  void removed(const ipc::BlockKey& key) override;
  void emptied(const ipc::Digest& root) override;
  void root_used(const ClientRecord& client) override;
  void root_left(const std::string& engine, const ipc::Digest& root) override;
  [[nodiscard]] Slice slice(std::uint64_t from) override;

  [[nodiscard]] Root* find(const ipc::Digest& root);
  [[nodiscard]] const KvGroups& groups_of(Root& root);
  void tell_soon(const ipc::Digest& root, const Root& known);
  void tell();
  void tell(Root& root);
  void join_soon();
  void join();
  void publish(const std::string& topic, KvEventRuns& runs);

  ipc::EventLoop& loop_;
  EngineDirectory& directory_;
  PrefixIndex& index_;
  ipc::KvEventEncoding encoding_;
  std::unordered_map<ipc::Digest, Root> roots_;
  std::vector<ipc::Digest> changed_;  ///< Roots with something pending.
  std::deque<Joining> joining_;
  ipc::TimerId tell_timer_ = 0;
  ipc::TimerId join_timer_ = 0;
  ipc::KvEventPublisher publisher_;
};

}  // namespace kvferry::cache_manager
