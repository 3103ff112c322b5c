// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/clear_scope.hpp"
#include "manager/context.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// The clears that run: each tells every rank's owner and attacher, waits for every answer (or its
/// death, or its deadline), drops the host tier if asked, and is done once with an outcome per
/// rank. @threading the loop's thread.
class ClearOperations {
 public:
  struct Order {
    ipc::Peer by;
    ipc::HostPolicy host = ipc::HostPolicy::kDrop;
    std::chrono::milliseconds deadline{};
  };
  /// failed: the first rank's error, which says how many more there are; or why it was cancelled,
  /// with nothing in the reply.
  struct Outcome {
    ipc::ClearReply reply;
    std::optional<ipc::Error> failed;
    bool cancelled = false;
    /// Workers and movers that were told to clear: those that had something mapped. Each of them
    /// empties its allocator for that.
    std::set<ipc::IncarnationId> told;
  };
  using Done = std::function<void(const Outcome& outcome)>;

  /// margin: what a rank may take beyond a clear's deadline.
  ClearOperations(ManagerContext& context, std::chrono::milliseconds margin)
      : context_(context), margin_(margin) {}
  ClearOperations(const ClearOperations&) = delete;
  ClearOperations& operator=(const ClearOperations&) = delete;
  ~ClearOperations() = default;

  /// Its engines run no other operation than this one, or the one that this is a part of: that
  /// goes on after it.
  void start(Order order, ClearScope scope, Done done);
  /// Ends those that run; what the ranks still say is not waited for.
  void cancel_all(const ipc::Error& why);

 private:
  /// Who was told to clear, and what of.
  struct Asked {
    ipc::IncarnationId peer;
    ipc::RankState state;
    ipc::LeaseId operation;
    bool is_owner = false;
  };
  struct ClearRank {
    std::string engine;
    ipc::Rank rank;
    std::optional<ipc::RankClearReply> outcome;  ///< The owner's.
    std::optional<ipc::Error> error;
    std::string attacher_note;
    // The attacher may be the first or the last one that gives memory back. 0: not known.
    std::uint64_t attacher_free_before = 0;
    std::uint64_t attacher_free_after = 0;
    std::optional<Asked> open_attacher;  ///< Its answer is waited for.
    bool attacher_failed = false;
    bool again = false;  ///< There was nothing left to clear.
  };
  struct Clear {
    Order order;
    Done done;
    ipc::LeaseId operation;
    ipc::TimePoint start;
    ClearScope scope;  ///< Operations keep their engines alive.
    std::vector<ClearRank> ranks;
    std::set<ipc::IncarnationId> told;
    std::size_t pending = 0;
    bool answered = false;
  };
  using ClearRef = std::shared_ptr<Clear>;  // Shared by the answers that are outstanding.

  [[nodiscard]] static ipc::TransitionFields step_of(const Asked& asked, std::uint64_t detail = 0);
  /// Memory that nobody here can reach is told, never passed over.
  static void add_unknown(Clear& clear);
  void start_clear(const ClearRef& clear, EngineRecord& engine);
  void send_clear(const ClearRef& clear, std::size_t index, const RankPeer& target, bool is_owner);
  void on_clear_answer(const ClearRef& clear,
                       std::size_t index,
                       const Asked& asked,
                       const ipc::Result<ipc::Envelope>& answer);
  /// The owner has answered: what it says holds, the attacher's answer is waited for a little only.
  void limit_attacher(const ClearRef& clear, std::size_t index);
  [[nodiscard]] static std::optional<ipc::Error> collect_outcomes(Clear& clear,
                                                                  ipc::ClearReply& reply);
  void finish_clear(const ClearRef& clear);

  ManagerContext& context_;
  std::chrono::milliseconds margin_;
  std::vector<ClearRef> clears_;
};

}  // namespace kvferry::cache_manager
