// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/paged_vector.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"
#include "manager/block_runs.hpp"
#include "manager/eviction_order.hpp"
#include "manager/host_pool.hpp"
#include "manager/namespace_accounts.hpp"
#include "manager/prefix_observer.hpp"
#include "split_map.hpp"
#include "split_table.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace kvferry::cache_manager {

/// On which terms a block is stored.
struct StoreTerms {
  NamespaceAccount* account = nullptr;  ///< Of the index's accounts; null: of no namespace.
  std::optional<ipc::Retention> retention{};
};

/// The prefix-addressed blocks of the host pool. A block goes Reserved -> Filling -> Visible, or is
/// gone; nothing finds it before every rank has stored it. When room is wanted, of the visible
/// blocks that nobody pins or reads those go that an EvictionPolicy chooses; of one prefix the last
/// block goes first, once it is known which block each one continues: from its reservation, or else
/// from the first use of both.
///
/// Whose blocks go: of a namespace that is at its hard limit its own. When the pool is full, of
/// the namespace that is most bytes above its soft share, counting for the one that stores what it
/// wants to store; then of the next one, as long as what goes leaves it its share. Where none is
/// above its share, of its own, unless the one that stores is within its share and another has a
/// larger part of its own: slabs lose some room at their ends, and that is to be lost by all. What
/// is visible, or on its way, is also in a table in shared memory,
/// where engines look.
/// @threading one thread. @lifetime the pool outlives it.
class PrefixIndex {
 public:
  /// Names one reservation; never repeated within a manager's life.
  using Token = std::uint64_t;
  using IsForeign = std::function<bool(const ipc::IncarnationId&)>;

  struct Stats {
    std::uint64_t visible = 0;
    std::uint64_t reserved = 0;  ///< Filling ones included.
    std::uint64_t pinned = 0;    ///< Blocks, not pins.
    std::uint64_t evicted = 0;
  };

  /// @param policy one of eviction_policies(); else throws Exception (kInvalidArgument), as for
  /// quotas that the pool cannot hold to
  PrefixIndex(HostPool& pool, std::string_view policy, NamespaceQuotas quotas = {});
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;
  ~PrefixIndex();

  /// Is told from now on. It outlives the index, or is taken away before it ends.
  void add_observer(PrefixObserver& observer) { observers_.push_back(&observer); }
  void remove_observer(PrefixObserver& observer) { std::erase(observers_, &observer); }
  using OnVisible = std::function<void(const ipc::BlockKey& key, const ipc::Digest& before)>;
  /// Calls back for the visible blocks among the `most` places from `from` on, and returns where
  /// the next ones begin, or 0 at the end. A block has one place for as long as it is visible.
  [[nodiscard]] std::size_t visit_visible(std::size_t from,
                                          std::size_t most,
                                          const OnVisible& on_visible) const;

  /// Presence of every block in every group, and the longest prefix that each group's rule allows.
  /// A look, which counts for nothing.
  [[nodiscard]] ipc::LookupReply lookup(const ipc::Digest& root,
                                        std::span<const ipc::Digest> blocks,
                                        std::span<const ipc::GroupRule> rules) const;
  /// A request uses these blocks of one prefix, first to last; those that are not visible do not
  /// count.
  void use(const ipc::Digest& root, std::span<const ipc::Digest> blocks, std::uint32_t groups);

  /// Counts the hashes of which at least one group's block was visible (unpin: pinned by client).
  std::uint32_t pin(const ipc::IncarnationId& client,
                    const ipc::Digest& root,
                    std::span<const ipc::Digest> blocks,
                    std::uint32_t groups);
  std::uint32_t unpin(const ipc::IncarnationId& client,
                      const ipc::Digest& root,
                      std::span<const ipc::Digest> blocks,
                      std::uint32_t groups);

  /// The same of one block: whether it is visible (unpin: pinned by client).
  bool pin(const ipc::IncarnationId& client, const ipc::BlockKey& key);
  bool unpin(const ipc::IncarnationId& client, const ipc::BlockKey& key);

  /// Those of the parts that a visible unit does not have; 0 where there is none.
  [[nodiscard]] std::uint64_t lacking(const ipc::BlockKey& key, std::uint64_t parts) const;

  /// Visible, or on its way there.
  [[nodiscard]] bool has(const ipc::BlockKey& key) const { return find(key) != nullptr; }
  /// A visible unit that does not have these parts gives way to one that will, unless it is pinned,
  /// or awaited: whoever reads it keeps what he has. Whether none that lacks some is left.
  bool drop_lacking(const ipc::BlockKey& key, std::uint64_t parts);
  /// Before the reservations of one request, as BlockRuns::begin().
  void begin_reserving() noexcept { runs_.begin(); }
  /// Reserves a slot for the key, evicting if it must; extent: as the pool's allocate(), and
  /// advanced. A block that is there gets the stronger retention.
  /// @param before the block that it continues; zero: none, or that is not known
  [[nodiscard]] ipc::ReservedSlot reserve(const ipc::IncarnationId& client,
                                          const ipc::BlockKey& key,
                                          const ipc::Digest& before,
                                          const SlabShape& shape,
                                          Extent& extent,
                                          const StoreTerms& terms = {});
  /// The key of a reservation of this client that no job has taken yet; null otherwise.
  [[nodiscard]] const ipc::BlockKey* reservation(const ipc::IncarnationId& client,
                                                 Token token) const;
  /// Reserved -> Filling, of these parts, a bit for each. @pre reservation(client, token) is not
  /// null.
  [[nodiscard]] HostBlockRef begin_fill(const ipc::IncarnationId& client,
                                        Token token,
                                        std::uint64_t parts = 1);
  /// Filling -> Visible, of a job's blocks: those that continue each other in this order are used
  /// as one request. Of each whether it was still there: else it was dropped meanwhile.
  std::vector<bool> commit(std::span<const Token> tokens);
  bool commit(Token token) { return commit(std::span(&token, 1)).front(); }
  /// The block, in whatever state, stays until it is not awaited any more. False where there is
  /// none. @pre of stop_awaiting(): await() said true, in the same call of the loop
  [[nodiscard]] bool await(const ipc::BlockKey& key);
  void stop_awaiting(const ipc::BlockKey& key);
  /// Reserved or Filling -> gone. Unknown tokens are ignored: the block was dropped before.
  void discard(Token token);

  /// The slot of a visible block for a load; null on a miss. No use of its own: whoever loads says
  /// what its request uses.
  [[nodiscard]] HostBlockRef acquire(const ipc::BlockKey& key);
  /// Its contents are not what they were: whoever holds the block, it is not found any more.
  void drop_block(const HostBlock& block);
  /// A slot outside the index, evicting if it must; null when the pool is full of blocks in use, or
  /// of blocks that stay for the sake of their namespaces. extent: as the pool's allocate(), and
  /// advanced. @param account of the namespace that it is for; null: of none
  [[nodiscard]] HostBlockRef allocate(const SlabShape& shape,
                                      Extent& extent,
                                      NamespaceAccount* account = nullptr);
  /// Blocks of one shape that are wanted together.
  struct Wanted {
    SlabShape shape;
    std::uint64_t blocks = 0;
  };
  enum class Fit : std::uint8_t {
    kFits,
    kOverLimit,  ///< Of the namespace's hard limit, whatever it evicted.
    kNoRoom      ///< In the pool, whatever went for the namespace's sake.
  };
  /// Whether allocate() could give all of these, each shape named once; nothing is evicted.
  /// Whoever wants all or none asks first. What fits may still turn out not to, by less than slabs
  /// lose at their ends and, of a namespace within its soft share, by what others have of theirs.
  [[nodiscard]] Fit fit(std::span<const Wanted> wanted, NamespaceAccount* account = nullptr) const;
  /// Evicts for blocks of the shape that may come; false: nothing can go, or must not.
  [[nodiscard]] bool evict_ahead(const SlabShape& shape);
  /// For which blocks were allocated lately, the last one last; a few of them.
  [[nodiscard]] std::span<const SlabShape> recent_shapes() const noexcept { return recent_; }
  /// What is above its hard limit goes, as after an adoption, but at most so many blocks: counts
  /// them.
  std::size_t enforce_limits(std::size_t most);
  [[nodiscard]] NamespaceAccounts& accounts() noexcept { return accounts_; }
  [[nodiscard]] const NamespaceAccounts& accounts() const noexcept { return accounts_; }
  /// Blocks that are retained for longer or shorter than others.
  [[nodiscard]] std::size_t retained() const noexcept { return order_.retained(); }
  using Now = std::function<ipc::TimePoint()>;
  /// @default the monotonic clock
  void set_clock(Now now) { now_ = std::move(now); }

  /// A block that is in the pool already, stored by an earlier manager.
  struct Found {
    ipc::BlockKey key;
    ipc::Digest before;
    HostBlockRef block;
  };
  /// These are to be adopted: until drop_root() or forget_awaited_roots() their roots count as
  /// there.
  void await_roots(std::span<const ipc::Digest> roots) {
    awaited_roots_.insert(roots.begin(), roots.end());
  }
  void forget_awaited_roots();
  struct Expected {
    ipc::Digest root;
    std::size_t blocks = 0;  ///< That will be announced.
  };
  /// Until announced_all() nobody knows which blocks awaited roots have: any of theirs is pending,
  /// and not to be stored.
  void begin_announcing(std::span<const Expected> roots);
  void announced_all() noexcept { is_announcing_ = false; }
  /// A block that was announced, until it is visible or gone; then it may be another one.
  using Announced = std::uint32_t;
  /// It will be announced soon: memory that this takes is fetched meanwhile.
  void expect(const ipc::BlockKey& key) const;
  /// The block is there, but pending until it is adopted. Nothing for one whose root is not awaited
  /// (any more), or whose key is there.
  [[nodiscard]] std::optional<Announced> announce(Found found);
  /// Those that were announced one after another find what they continue, as far as it is
  /// announced, so that adopt() need not. @pre announced_all()
  void connect(std::span<const Announced> blocks);
  struct Adopted {
    std::size_t looked_at = 0;  ///< Of those that were named, the first ones.
    std::size_t visible = 0;    ///< Blocks that became so, others than were named included.
  };
  /// Makes those visible that are still there, each behind what it continues, whatever their order,
  /// until some `most` blocks are. Blocks that continue each other are used as one request; those
  /// that were used last come last.
  Adopted adopt(std::span<const Announced> blocks, std::size_t most);
  /// Both at once: counts those that are visible now.
  std::size_t adopt(std::span<const Found> blocks);
  /// Announced, and neither visible nor gone.
  [[nodiscard]] std::size_t announced() const noexcept { return announced_; }
  /// Whether blocks go when room is wanted. @default yes
  void set_evicts(bool evicts) noexcept { evicts_ = evicts; }
  [[nodiscard]] bool evicts() const noexcept { return evicts_; }
  /// Counts on from an earlier manager's.
  void set_uses(std::uint32_t uses) noexcept { uses_ = uses; }

  /// Ends a client's pins and reservations (not what is being filled).
  void drop_client(const ipc::IncarnationId& client);
  /// Drops the root's blocks, except those that a foreign client pins, reserves or fills. Readers
  /// keep their slots until they are done. Counts visible blocks.
  std::uint64_t drop_root(const ipc::Digest& root, const IsForeign& is_foreign);
  [[nodiscard]] bool has_root(const ipc::Digest& root) const {
    return roots_.contains(root) || awaited_roots_.contains(root);
  }
  [[nodiscard]] const Stats& stats() const noexcept { return stats_; }
  [[nodiscard]] const ipc::PrefixTable& table() const noexcept { return table_; }

 private:
  /// kAnnounced: in the pool, by an earlier manager, and not visible yet.
  enum class State : std::uint8_t { kReserved, kFilling, kVisible, kAnnounced };
  using Pins = std::unordered_map<ipc::IncarnationId, std::uint32_t>;
  /// Where it is in store_.
  using Place = std::uint32_t;
  static constexpr Place kNoPlace = std::numeric_limits<Place>::max();
  struct Entry : RunNode {
    State state = State::kReserved;
    bool is_next = false;  ///< Of make_findable(). id: in entries_, while it is visible.
    Place place = kNoPlace;
    /// Of what it continues, as connect() found it, as far as that is still there.
    Place before_at = kNoPlace;
    Token token = 0;
    HostBlockRef block;
    std::unique_ptr<Pins> pins;  ///< Null: none.
    /// Reservations that continue it: until they are visible, or gone, it stays.
    std::uint32_t awaited_by = 0;
    Kept kept;
    /// Of the same slab.
    Entry* slab_next = nullptr;
    Entry* slab_previous = nullptr;
  };
  /// Of an entry that is not visible yet, nor found.
  struct Reservation {
    Entry* entry = nullptr;
    ipc::IncarnationId owner;
    Token before = 0;  ///< Of that entry, where it waits for this one to be visible.
  };
  struct SlabEntries {
    Entry* first = nullptr;
    std::uint32_t count = 0;
  };
  /// Names an entry by a part of its key's hash; the rest is the entry's to say.
  struct Named {
    std::uint32_t tag = 0;
    Place place = kNoPlace;

    [[nodiscard]] bool is_used() const noexcept { return place != kNoPlace; }
    [[nodiscard]] std::uint64_t hash() const noexcept { return std::uint64_t{tag} << 32U; }
  };
  /// Of one root.
  using Table = SplitTable<Named>;

  [[nodiscard]] static std::uint64_t hash_of(const ipc::BlockKey& key) noexcept {
    return spread_bits(SplitMapKey<ipc::BlockKey>::Hash{}(key));
  }
  /// What it continues; null: it is not there.
  [[nodiscard]] Entry* find_before(const Entry& entry);
  [[nodiscard]] const Named* find_in(const Table& table, const ipc::BlockKey& key) const;
  /// kNoPlace: there is none.
  [[nodiscard]] Place place_of(const ipc::BlockKey& key) const;
  [[nodiscard]] Entry* find(const ipc::BlockKey& key) {
    const Place place = place_of(key);
    return place == kNoPlace ? nullptr : &store_[place];
  }
  [[nodiscard]] const Entry* find(const ipc::BlockKey& key) const {
    const Place place = place_of(key);
    return place == kNoPlace ? nullptr : &store_[place];
  }
  /// Not in its root's table yet.
  [[nodiscard]] Entry& make_entry();
  static void name(const Entry& entry, Table& table);
  /// It is nowhere else any more.
  void unmake(Entry& entry);
  [[nodiscard]] static bool is_reserved(const Entry& entry) noexcept {
    return entry.state == State::kReserved || entry.state == State::kFilling;
  }
  [[nodiscard]] static bool is_evictable(const Entry& entry) {
    return entry.id != kNoEntry && entry.pins == nullptr && entry.awaited_by == 0 &&
           entry.block.use_count() == 1;
  }
  [[nodiscard]] NamespaceAccount& account_of(const Entry& entry) const;
  /// A visible block that nobody pins, from now on, and not any more.
  void begin_cached(const Entry& entry);
  void end_cached(const Entry& entry);
  void retain(Entry& entry, const ipc::Retention& retention);
  [[nodiscard]] static BlockUse use_of(const Entry& entry);
  void give_id(Entry& entry);
  void tell_visible(const Entry& entry) const;
  void tell_used(const Entry& entry) const;
  void use_new(std::span<Entry* const> entries);
  void make_findable(Entry& entry);
  /// What a reservation continues stays until that is over.
  void hold_before(const Entry& entry, Reservation& reservation);
  void add_awaiting(Entry& entry);
  void take_awaiting(Entry& entry);
  void let_go_before(const Reservation& reservation);
  void unpin_entry(Entry& entry, const ipc::IncarnationId& client, bool all);
  void erase(Entry& entry);
  void enter_slab(Entry& entry);
  void leave_slab(Entry& entry);
  /// Adds it to adopted_, behind those that it continues and that are announced, too.
  void add_chain(Entry& entry);
  /// Memory of the first ones, and of what they continue, comes into the processor's cache.
  void scout(std::span<const Announced> blocks) const;
  static void fetch(const Entry& entry);
  [[nodiscard]] static bool is_none(const ipc::Digest& digest) noexcept {
    return SplitMapKey<ipc::BlockKey>::Equal::is_same(digest, {});
  }
  void make_adopted_visible();
  [[nodiscard]] bool is_unknown(const ipc::Digest& root) const {
    return is_announcing_ && awaited_roots_.contains(root);
  }

  /// For whom room is made, and what may be taken of others.
  struct Need {
    const SlabShape& shape;
    const NamespaceAccount* account = nullptr;  ///< Null: nobody, yet.
    /// With what has been evicted for it before, and is not charged yet.
    std::uint64_t bytes = 0;
    /// Nobody is above its share: it may take of those that have a larger part of theirs.
    bool is_level = false;
  };
  class Fitting;  ///< Of fit().
  void note_shape(const SlabShape& shape);
  [[nodiscard]] bool make_room_in(NamespaceAccount& account,
                                  const SlabShape& shape,
                                  const Extent& extent);
  /// evicted: blocks that went for the same batch and are not placed yet.
  [[nodiscard]] bool evict_for(const SlabShape& shape,
                               const NamespaceAccount* account,
                               std::uint64_t evicted);
  [[nodiscard]] bool evict_of(const Partition& partition, const Need& need);
  /// Bytes that may go of it.
  [[nodiscard]] static std::uint64_t allowance(const Partition& partition, const Need& need);
  /// What the partition has beyond the part of its share that `bytes` are of the other's.
  [[nodiscard]] static std::uint64_t above_level(const Partition& partition,
                                                 const Partition& other,
                                                 std::uint64_t bytes);
  struct Ranked {
    double rank = 0;
    std::size_t place = 0;  ///< Decides among equals.
    const Partition* partition = nullptr;
  };
  /// Those that are above their share, by how much.
  [[nodiscard]] std::vector<Ranked> excesses(const Need& need) const;
  /// Those of which some may go, by how much of their share they have.
  [[nodiscard]] std::vector<Ranked> fullnesses(const Need& need) const;
  /// Asks them in the order of their ranks, the highest one first.
  [[nodiscard]] static bool first_of(std::vector<Ranked> partitions,
                                     const std::function<bool(const Partition&)>& gives);
  [[nodiscard]] bool can_evict_slab(std::uint32_t slab, const Need& need);
  void evict_slab(std::uint32_t slab, const Need& need);
  void evict_entry(Entry& entry, const NamespaceAccount* account);

  HostPool& pool_;
  NamespaceAccounts accounts_;  ///< Before what is charged to them.
  PagedVector<Entry> store_;
  std::vector<Place> unused_;  ///< Of store_.
  std::unordered_map<ipc::Digest, Table> roots_;
  std::unordered_map<Token, Reservation> tokens_;  ///< Reserved and Filling.
  std::unordered_map<std::uint32_t, SlabEntries> by_slab_;
  std::unordered_map<ipc::IncarnationId, std::unordered_set<Entry*>> pinned_by_;
  std::vector<SlabShape> recent_;
  EvictionOrder order_;
  Now now_ = [] { return ipc::MonotonicClock::now(); };
  PagedVector<Entry*> entries_;  ///< Visible, by EntryId.
  std::vector<EntryId> free_ids_;
  std::vector<BlockUse> path_;  ///< Of use(), kept for its memory.
  ipc::PrefixTable table_;
  BlockRuns runs_;
  Token next_token_;
  std::unordered_set<ipc::Digest> awaited_roots_;
  bool is_announcing_ = false;
  std::size_t announced_ = 0;
  std::vector<Entry*> chain_;    ///< Of add_chain() and
  std::vector<Entry*> adopted_;  ///< of adopt(), kept for their memory.
  bool evicts_ = true;
  std::uint32_t uses_ = 0;  ///< Of prefixes, ever; wraps.
  Stats stats_;
  std::vector<PrefixObserver*> observers_;
};

}  // namespace kvferry::cache_manager
