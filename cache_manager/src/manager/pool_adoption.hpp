// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/process.hpp"
#include "manager/adoption_stats.hpp"
#include "manager/context.hpp"
#include "manager/host_pool.hpp"
#include "manager/late_sums.hpp"
#include "manager/pool_catalogue.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

namespace kvferry::cache_manager {

/// What an earlier manager left in the pool becomes this one's: visible blocks can be found again,
/// a piece of them in each turn of the loop, so that everybody is served meanwhile. Slots that
/// somebody may have been writing stay taken, and nothing is evicted, until each process that may
/// copy for the earlier manager is dead, or has come to this one, which it does when it is idle.
/// Blocks that had no checksums yet are dropped, unless the movers that stored them tell of some.
/// @threading the loop's thread. @lifetime the context outlives it.
class PoolAdoption {
 public:
  /// Takes slabs and slots; blocks follow. Before anything of the pool is given to anybody.
  PoolAdoption(ManagerContext& context, PoolCatalogue& catalogue);
  PoolAdoption(const PoolAdoption&) = delete;
  PoolAdoption& operator=(const PoolAdoption&) = delete;
  ~PoolAdoption();

  /// Somebody came, or is dead.
  void look();
  /// By a rank's mover, which was asked.
  void told(const ipc::IncarnationId& mover, std::uint32_t rank, const ipc::KeptSums& sums);

 private:
  struct User {
    ipc::ProcessRef process;
    PoolCatalogue::FoundUser known;
  };

  /// A mover of the earlier manager, which may have checksums that the manager had not.
  struct Teller {
    ipc::ProcessRef process;
    ipc::IncarnationId incarnation;
    bool is_asked = false;
  };

  /// A visible block that was found.
  struct Visible {
    HostBlockRef held;
    std::uint32_t used = 0;
  };
  /// An announced one.
  struct Announced {
    std::uint32_t used = 0;
    PrefixIndex::Announced block = 0;
  };

  void take_slab(const SlabPlace& place);
  void take_sequence(const HostSlot& slot);
  void find_users();
  /// First all are announced, in the order in which they lie in the pool; nobody takes them for
  /// misses from then on.
  void announce_some();
  /// If it can be served; else it waits for checksums, or is dropped.
  void announce(Visible visible, const PoolCatalogue::FoundBlock& found);
  /// Then each finds what it continues.
  void connect_some();
  [[nodiscard]] ipc::BlockKey key_of(const PoolCatalogue::FoundBlock& found,
                                     const HostSlot& slot) const;
  [[nodiscard]] static std::vector<PrefixIndex::Announced> blocks_of(
      std::span<const Announced> announced);
  static void sort_by_use(std::vector<Announced>& announced);
  /// Then they become visible, what was used last comes last.
  void adopt_some();
  void all_adopted();
  /// In another turn of the loop.
  void go_on(void (PoolAdoption::*next)());
  void ask_for_sums();
  /// Nobody tells any more.
  void drop_late();
  void end();
  [[nodiscard]] bool is_settled(const User& user) const;
  void begin_to_evict();
  /// What namespaces have above their limits, which may be lower than they were, goes.
  void shrink();
  [[nodiscard]] NamespaceAccount* account_of(const ipc::Digest& root);

  ManagerContext& context_;
  PoolCatalogue& catalogue_;
  const ipc::TimePoint began_ = ipc::MonotonicClock::now();
  std::vector<HostSlot> sequences_;  ///< Taken, of swapped-out sequences.
  std::vector<Visible> visible_;     ///< Not in the index yet.
  std::vector<Announced> announced_;
  std::size_t next_ = 0;  ///< Of those, or of the visible ones.
  std::vector<HostBlockRef> doubtful_;
  std::vector<User> users_;  ///< That are not settled.
  std::map<ipc::Digest, PoolCatalogue::FoundRoot> roots_;
  std::map<ipc::Digest, NamespaceAccount*> accounts_;  ///< By root; null: of none.
  /// The same by the roots' places.
  std::vector<std::optional<NamespaceAccount*>> accounts_at_{catalogue::kRoots};
  std::vector<std::size_t> visible_of_ = std::vector<std::size_t>(catalogue::kRoots, 0);
  std::set<ipc::IncarnationId> owners_;  ///< Engines that live, and may come back for sequences.
  LateSums late_;
  std::vector<Teller> tellers_;  ///< That have not told all.
  bool is_asking_ = false;       ///< All that is found has been looked at.
  bool evicts_ = false;
  ipc::TimerId patience_ = 0;
  ipc::TimerId sums_patience_ = 0;
  /// Of posted work, which may come after the end.
  std::shared_ptr<bool> is_living_ = std::make_shared<bool>(true);
  AdoptionStats& stats_;
};

}  // namespace kvferry::cache_manager
