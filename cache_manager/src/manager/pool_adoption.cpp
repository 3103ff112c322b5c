// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/pool_adoption.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// In one turn of the loop: a few milliseconds.
constexpr std::size_t kBlocksOfATurn = 2048;
/// Whose memory is fetched while others are looked at: about as many lines as a core can.
constexpr std::size_t kBlocksAtOnce = 16;
/// Blocks may be evicted then in any case: who still reads them for a lost manager gets no answer
/// that counts.
constexpr auto kPatience = std::chrono::seconds(10);

}  // namespace

PoolAdoption::PoolAdoption(ManagerContext& context, PoolCatalogue& catalogue)
    : context_(context),
      catalogue_(catalogue),
      late_(context.pool),
      stats_(context.adopted.emplace()) {
  context_.adoption = this;
  context_.index.set_evicts(false);
  std::vector<ipc::Digest> roots;
  for (PoolCatalogue::FoundRoot& root : catalogue_.roots()) {
    roots.push_back(root.root);
    if (!root.engine.empty()) {
      context_.directory.adopt_root(root.engine, root.root, root.fingerprint);
    }
    roots_.emplace(root.root, std::move(root));
  }
  // A clear that comes before they can be found drops them, too.
  context_.index.await_roots(roots);
  for (const SlabPlace& place : catalogue_.slabs()) take_slab(place);
  find_users();
  // Behind all slots: one that is not kept may be the last of its slab that is taken.
  for (const HostSlot& slot : std::exchange(sequences_, {})) take_sequence(slot);
  // Uses go on from the last one. The count wraps, after 4 billion.
  const auto last =
      std::max_element(visible_.begin(), visible_.end(),
                       [](const Visible& a, const Visible& b) { return a.used < b.used; });
  if (last != visible_.end()) context_.index.set_uses(last->used);
  stats_.found = visible_.size();
  stats_.doubtful = doubtful_.size();
  ipc::log_info(
      "pool {} is an earlier manager's: {} blocks, {} slots that somebody may be writing, "
      "{} processes that may copy",
      catalogue_.id().hex(), stats_.found, stats_.doubtful, users_.size());
  if (const std::uint64_t damaged = catalogue_.damaged(); damaged > 0) {
    ipc::log_error("pool {}: {} records of its catalogue are damaged: what they named is dropped",
                   catalogue_.id().hex(), damaged);
  }
  patience_ = context_.loop.after(kPatience, [this] {
    patience_ = 0;
    if (!evicts_) {
      ipc::log_warn(
          "{} processes of an earlier manager have neither come nor ended: the {} slots "
          "that they may be writing are not used",
          users_.size(), doubtful_.size());
    }
    begin_to_evict();
  });
  look();
  if (visible_.empty()) {
    end();
    return;
  }
  std::vector<PrefixIndex::Expected> expected;
  for (std::uint16_t place = 0; place < catalogue::kRoots; ++place) {
    const std::size_t blocks = visible_of_[place];
    if (blocks > 0) expected.push_back({catalogue_.root_at(place), blocks});
  }
  context_.index.begin_announcing(expected);
  go_on(&PoolAdoption::announce_some);
}

PoolAdoption::~PoolAdoption() {
  *is_living_ = false;
  context_.adoption = nullptr;
  context_.loop.cancel(patience_);
  context_.loop.cancel(sums_patience_);
  for (const User& user : users_) {
    if (user.process.valid()) context_.loop.unwatch(user.process.pidfd());
  }
}

void PoolAdoption::go_on(void (PoolAdoption::*next)()) {
  context_.loop.post([this, next, living = is_living_] {
    if (*living) (this->*next)();
  });
}

// Blocks are charged at once, so that nobody finds a namespace empty whose blocks are still to
// come.
void PoolAdoption::take_slab(const SlabPlace& place) {
  const auto adopted = context_.pool.adopt(place);
  if (!adopted) {
    ipc::log_warn("pool {}: {}; its blocks are dropped", catalogue_.id().hex(),
                  adopted.error().message);
    catalogue_.forget_slab(place.first_page);
    return;
  }
  for (std::uint32_t i = 0; i < place.capacity; ++i) {
    const PoolCatalogue::FoundSlot found = catalogue_.adopt(*adopted, i);
    switch (found.state) {
      case catalogue::BlockState::kVisible: {
        auto& account = accounts_at_[found.root];
        ++visible_of_[found.root];
        if (!account) account = account_of(catalogue_.root_at(found.root));
        visible_.push_back(
            {std::make_shared<const HostBlock>(context_.pool, context_.pool.adopt_slot(*adopted, i),
                                               /*is_doubted=*/true, *account),
             found.used});
        break;
      }
      case catalogue::BlockState::kSequence:
        sequences_.push_back(context_.pool.adopt_slot(*adopted, i));
        break;
      case catalogue::BlockState::kTaken:
        doubtful_.push_back(std::make_shared<const HostBlock>(
            context_.pool, context_.pool.adopt_slot(*adopted, i)));
        break;
      default: break;
    }
  }
  context_.pool.close_if_unused(*adopted);
}

// Of a root that has a block: what is left of others says nothing of who has the name now.
NamespaceAccount* PoolAdoption::account_of(const ipc::Digest& root) {
  if (const auto known = accounts_.find(root); known != accounts_.end()) return known->second;
  const auto found = roots_.find(root);
  NamespaceAccount* const account =
      found == roots_.end() || found->second.name_space.empty()
          ? nullptr
          : &context_.index.accounts().adopt(found->second.name_space, found->second.proof);
  accounts_.emplace(root, account);
  return account;
}

void PoolAdoption::take_sequence(const HostSlot& slot) {
  const auto found = catalogue_.find_sequence(slot);
  auto held = std::make_shared<const HostBlock>(context_.pool, slot, /*is_doubted=*/true,
                                                found ? account_of(found->root) : nullptr);
  // Of an owner that nobody knows, nobody would ever be told that it is dead.
  if (!found || catalogue_.sums(slot).empty() || !owners_.contains(found->owner)) return;
  const SequenceKey key{context_.directory.open(found->engine).id(), found->owner, found->handle};
  const SequenceStore::Life life = context_.sequences.open(key, found->fingerprint);
  if (context_.sequences.put(key, life, context_.pool.shape(slot).group, found->index,
                             std::move(held))) {
    ++stats_.sequences;
  }
}

void PoolAdoption::find_users() {
  for (const PoolCatalogue::FoundUser& known : catalogue_.users()) {
    auto process = ipc::ProcessRef::of_pid(known.pid);
    const bool is_gone = process ? process->start_time() != known.start_time || process->has_died()
                                 : process.error().code == ipc::ErrorCode::kPeerDied;
    if (is_gone) {
      catalogue_.forget_user(known.incarnation);
      continue;
    }
    if (known.kind == catalogue::UserKind::kEngine) owners_.insert(known.incarnation);
    if (known.kind == catalogue::UserKind::kMover && process) {
      auto teller = ipc::ProcessRef::of_pid(known.pid);
      // Dead since, or one more descriptor than there is: it tells nothing.
      if (teller) tellers_.push_back({std::move(teller).value(), known.incarnation});
    }
    if (!process) {
      users_.push_back({ipc::ProcessRef(), known});
      // It may live, and write.
      ipc::log_warn("process {} of an earlier manager cannot be watched: {}", known.pid,
                    process.error().to_string());
    } else {
      users_.push_back({std::move(process).value(), known});
      context_.loop.watch(users_.back().process.pidfd(), [this] { look(); });
    }
  }
}

bool PoolAdoption::is_settled(const User& user) const {
  if (user.process.valid() && user.process.has_died()) return true;
  if (user.known.kind == catalogue::UserKind::kEngine) {
    return context_.directory.client(user.known.incarnation) != nullptr;
  }
  const EngineRecord* engine = context_.directory.engine_of(user.known.incarnation);
  if (engine == nullptr) return false;
  return user.known.kind == catalogue::UserKind::kMover ||
         engine->is_settled_worker(user.known.incarnation);
}

void PoolAdoption::look() {
  ask_for_sums();
  if (users_.empty() && evicts_) return;
  std::erase_if(users_, [this](const User& user) {
    if (!is_settled(user)) return false;
    if (user.process.valid()) context_.loop.unwatch(user.process.pidfd());
    if (user.process.valid() && user.process.has_died()) {
      context_.sequences.drop_owner(user.known.incarnation);
      catalogue_.forget_user(user.known.incarnation);
    }
    return true;
  });
  // An engine copies nothing itself.
  if (std::any_of(users_.begin(), users_.end(), [](const User& user) {
        return user.known.kind != catalogue::UserKind::kEngine;
      })) {
    return;
  }
  if (!doubtful_.empty()) {
    ipc::log_info("nobody copies for an earlier manager any more: {} slots are free",
                  doubtful_.size());
  }
  doubtful_.clear();
  stats_.doubtful = 0;
  begin_to_evict();
}

void PoolAdoption::begin_to_evict() {
  evicts_ = true;
  context_.index.set_evicts(true);
  context_.loop.cancel(std::exchange(patience_, 0));
  shrink();
}

void PoolAdoption::shrink() {
  if (!evicts_ || context_.index.enforce_limits(kBlocksOfATurn) < kBlocksOfATurn) return;
  go_on(&PoolAdoption::shrink);
}

void PoolAdoption::announce_some() {
  const std::size_t end_of_turn = std::min(visible_.size(), next_ + kBlocksOfATurn);
  while (next_ < end_of_turn) {
    std::array<std::optional<PoolCatalogue::FoundBlock>, kBlocksAtOnce> found;
    const std::size_t count = std::min(kBlocksAtOnce, end_of_turn - next_);
    for (std::size_t i = 0; i < count; ++i) {
      const HostSlot& slot = visible_[next_ + i].held->slot();
      found[i] = catalogue_.find(slot);
      if (found[i]) context_.index.expect(key_of(*found[i], slot));
    }
    for (std::size_t i = 0; i < count; ++i, ++next_) {
      if (found[i]) {
        announce(std::move(visible_[next_]), *found[i]);
      } else {
        visible_[next_].held.reset();
        ++stats_.dropped;
      }
    }
  }
  if (next_ < visible_.size()) return go_on(&PoolAdoption::announce_some);
  visible_ = {};
  next_ = 0;
  context_.index.announced_all();
  go_on(&PoolAdoption::connect_some);
}

ipc::BlockKey PoolAdoption::key_of(const PoolCatalogue::FoundBlock& found,
                                   const HostSlot& slot) const {
  return {found.root, found.block, context_.pool.shape(slot).group};
}

void PoolAdoption::connect_some() {
  const std::size_t count = std::min(announced_.size() - next_, kBlocksOfATurn);
  context_.index.connect(blocks_of({announced_.data() + next_, count}));
  next_ += count;
  if (next_ < announced_.size()) return go_on(&PoolAdoption::connect_some);
  next_ = 0;
  sort_by_use(announced_);
  go_on(&PoolAdoption::adopt_some);
}

void PoolAdoption::announce(Visible visible, const PoolCatalogue::FoundBlock& found) {
  const ipc::BlockKey key = key_of(found, visible.held->slot());
  if (found.summed_parts != 0) {
    visible.held->set_parts(found.summed_parts);
    const auto announced = context_.index.announce({key, found.before, std::move(visible.held)});
    if (announced) {
      announced_.push_back({visible.used, *announced});
    } else {
      ++stats_.dropped;
    }
  } else if (!tellers_.empty() && found.awaited &&
             late_.add({key, found.before, std::move(visible.held), *found.awaited, found.parts})) {
    stats_.awaited = late_.size();
  } else {
    // One without checksums cannot be looked at.
    ++stats_.dropped;
    ++stats_.unsummed;
  }
}

// Blocks of one use keep their order. In three rounds by 11 bits: comparing would take ten times as
// long.
void PoolAdoption::sort_by_use(std::vector<Announced>& announced) {
  const auto is_before = [](const Announced& a, const Announced& b) { return a.used < b.used; };
  if (std::is_sorted(announced.begin(), announced.end(), is_before)) return;
  constexpr unsigned kBits = 11;
  constexpr std::uint32_t kMask = (1U << kBits) - 1;
  std::vector<Announced> sorted(announced.size());
  for (unsigned shift = 0; shift < 32; shift += kBits) {
    std::array<std::size_t, kMask + 1> places{};
    for (const Announced& one : announced) ++places[one.used >> shift & kMask];
    std::size_t place = 0;
    for (std::size_t& first : places) place += std::exchange(first, place);
    for (const Announced& one : announced) sorted[places[one.used >> shift & kMask]++] = one;
    announced.swap(sorted);
  }
}

std::vector<PrefixIndex::Announced> PoolAdoption::blocks_of(std::span<const Announced> announced) {
  std::vector<PrefixIndex::Announced> blocks;
  blocks.reserve(announced.size());
  for (const Announced& one : announced) blocks.push_back(one.block);
  return blocks;
}

void PoolAdoption::adopt_some() {
  const std::size_t count = std::min(announced_.size() - next_, kBlocksOfATurn);
  const PrefixIndex::Adopted adopted =
      context_.index.adopt(blocks_of({announced_.data() + next_, count}), kBlocksOfATurn);
  next_ += adopted.looked_at;
  stats_.adopted += adopted.visible;
  shrink();
  if (next_ < announced_.size()) return go_on(&PoolAdoption::adopt_some);
  all_adopted();
}

void PoolAdoption::all_adopted() {
  stats_.dropped += announced_.size() - stats_.adopted;  // with roots that were cleared meanwhile
  announced_ = {};
  next_ = 0;
  if (late_.empty()) return end();
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(ipc::MonotonicClock::now() - began_);
  ipc::log_info(
      "{} blocks of the earlier manager can be found again after {} ms; {} have no checksums yet, "
      "which {} movers may tell",
      stats_.adopted, took.count(), late_.size(), tellers_.size());
  is_asking_ = true;
  sums_patience_ = context_.loop.after(context_.config.late_sums_deadline, [this] {
    sums_patience_ = 0;
    ipc::log_warn("{} movers of an earlier manager have not told all checksums that they have",
                  tellers_.size());
    tellers_.clear();
    drop_late();
  });
  ask_for_sums();
}

void PoolAdoption::ask_for_sums() {
  if (!is_asking_) return;
  std::erase_if(tellers_, [](const Teller& teller) { return teller.process.has_died(); });
  for (Teller& teller : tellers_) {
    const EngineRecord* engine = context_.directory.engine_of(teller.incarnation);
    if (teller.is_asked || engine == nullptr || !engine->rank_of_mover(teller.incarnation)) {
      continue;
    }
    // One that takes no messages now is asked when something else happens.
    teller.is_asked =
        context_.server.notify(teller.incarnation, ipc::MessageKind::kTellSums, ipc::Empty{})
            .has_value();
  }
  if (tellers_.empty()) drop_late();
}

void PoolAdoption::told(const ipc::IncarnationId& mover,
                        std::uint32_t rank,
                        const ipc::KeptSums& sums) {
  if (!is_asking_) return;
  std::vector<PrefixIndex::Found> blocks;
  for (LateSums::Block& block : late_.told(rank, sums.sums)) {
    if (context_.index.has(block.key)) {
      ++stats_.dropped;
      ++stats_.stored_anew;
      continue;
    }
    catalogue_.on_summed(block.held->slot(), block.sums);
    ++context_.integrity.summed;
    block.held->set_parts(block.parts);
    blocks.push_back({block.key, block.before, std::move(block.held)});
  }
  const std::size_t adopted = context_.index.adopt(blocks);
  stats_.adopted += adopted;
  stats_.dropped += blocks.size() - adopted;
  stats_.awaited = late_.size();
  shrink();
  if (sums.is_last) {
    std::erase_if(tellers_, [&mover](const Teller& teller) { return teller.incarnation == mover; });
  }
  if (late_.empty() || tellers_.empty()) drop_late();
}

void PoolAdoption::drop_late() {
  is_asking_ = false;
  context_.loop.cancel(std::exchange(sums_patience_, 0));
  const std::size_t dropped = late_.drop(kBlocksOfATurn);
  stats_.dropped += dropped;
  stats_.unsummed += dropped;
  stats_.awaited = late_.size();
  if (late_.empty()) return end();
  go_on(&PoolAdoption::drop_late);
}

void PoolAdoption::end() {
  tellers_.clear();
  context_.index.forget_awaited_roots();
  context_.index.accounts().end_adoption();
  if (stats_.found == 0) return;
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(ipc::MonotonicClock::now() - began_);
  ipc::log_info(
      "{} blocks of the earlier manager can be found again after {} ms, {} were dropped: {} for "
      "want of checksums, {} because they were stored anew",
      stats_.adopted, took.count(), stats_.dropped, stats_.unsummed, stats_.stored_anew);
}

}  // namespace kvferry::cache_manager
