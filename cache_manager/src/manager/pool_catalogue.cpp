// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/pool_catalogue.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <utility>

namespace kvferry::cache_manager {

using catalogue::Block;
using catalogue::BlockState;
using catalogue::Header;
using catalogue::Progress;
using catalogue::Root;
using catalogue::Slab;
using catalogue::SumsState;
using catalogue::User;

namespace {

std::uint64_t hash_of(const void* data, std::size_t size, std::uint64_t seed) {
  const std::uint64_t hash = ipc::Digest::hash(data, size, seed).low();
  return hash == 0 ? 1 : hash;  // zero says that there is nothing
}

template <typename T> std::uint64_t check_value(const T& record, std::uint64_t seed) {
  static_assert(offsetof(T, check) == 0);
  return hash_of(reinterpret_cast<const std::byte*>(&record) + sizeof(std::uint64_t),
                 sizeof(T) - sizeof(std::uint64_t), seed);
}

std::uint64_t* sums_of(Block& record) noexcept {
  return reinterpret_cast<std::uint64_t*>(&record + 1);
}

template <std::size_t Most>
std::string name_in(const std::array<char, Most>& name, std::uint32_t bytes) {
  return {name.data(), std::min<std::size_t>(bytes, Most)};
}

template <std::size_t Most>
std::uint32_t write_name(std::array<char, Most>& name, const std::string& text) {
  const std::size_t bytes = std::min(text.size(), Most);
  std::memcpy(name.data(), text.data(), bytes);
  return static_cast<std::uint32_t>(bytes);
}

std::string name_of(const Root& record) { return name_in(record.engine, record.engine_bytes); }

}  // namespace

PoolCatalogue::PoolCatalogue(Memory memory)
    : fd_(std::move(memory.fd)),
      mapping_(std::move(memory.mapping)),
      id_(memory.id),
      pages_(memory.pool.pages),
      layout_(memory.pool.pages, memory.pool.page_bytes),
      known_roots_(catalogue::kRoots),
      blocks_of_root_(catalogue::kRoots, 0) {}

ipc::Result<std::unique_ptr<PoolCatalogue>> PoolCatalogue::create(const HostPool::Stats& pool,
                                                                  const ipc::Digest& id) {
  const catalogue::Layout layout(pool.pages, pool.page_bytes);
  KVFERRY_ASSIGN(ipc::UniqueFd fd,
                 ipc::SharedMemory::create_pool("kvferry-catalogue", layout.total, false));
  KVFERRY_ASSIGN(ipc::SharedMapping mapping, ipc::SharedMemory::map_pool(fd, layout.total));
  Memory memory{std::move(fd), std::move(mapping), id, pool};
  std::unique_ptr<PoolCatalogue> made(new PoolCatalogue(std::move(memory)));
  Header& header = *made->at<Header>(0);
  header.magic = catalogue::kMagic;
  header.version = catalogue::kVersion;
  header.pages = pool.pages;
  header.page_bytes = pool.page_bytes;
  header.pool_bytes = pool.bytes;
  header.total_bytes = layout.total;
  header.pool = id;
  made->seal(header);
  return made;
}

ipc::Result<std::unique_ptr<PoolCatalogue>> PoolCatalogue::open(const ipc::PoolMemory& memory,
                                                                const HostPool::Stats& pool) {
  if (memory.catalogue_bytes < catalogue::kPage) {
    return KVFERRY_ERROR(kProtocol, "the catalogue of pool {} has {} bytes", memory.id.hex(),
                         memory.catalogue_bytes);
  }
  KVFERRY_ASSIGN(ipc::SharedMapping mapping,
                 ipc::SharedMemory::map_pool(memory.catalogue, memory.catalogue_bytes));
  Header header{};
  std::memcpy(&header, mapping.data(), sizeof(header));
  // First, and alone: the rest of another version's header may be anything.
  if (header.magic != catalogue::kMagic) {
    return KVFERRY_ERROR(kProtocol, "what is kept for pool {} is no catalogue", memory.id.hex());
  }
  if (header.version != catalogue::kVersion) {
    return KVFERRY_ERROR(kVersionMismatch,
                         "the catalogue of pool {} has format {}, {} is known: it is discarded",
                         memory.id.hex(), header.version, catalogue::kVersion);
  }
  const catalogue::Layout layout(pool.pages, pool.page_bytes);
  if (header.pages != pool.pages || header.page_bytes != pool.page_bytes ||
      header.pool_bytes != pool.bytes || memory.pool_bytes != pool.bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "pool {} has {} in {} pages, {} in {} are configured",
                         memory.id.hex(), ipc::format_size(header.pool_bytes), header.pages,
                         ipc::format_size(pool.bytes), pool.pages);
  }
  if (header.total_bytes != layout.total || memory.catalogue_bytes != layout.total ||
      header.pool != memory.id) {
    return KVFERRY_ERROR(kProtocol, "the catalogue of pool {} is one of {} with {} bytes, not {}",
                         memory.id.hex(), header.pool.hex(), header.total_bytes, layout.total);
  }
  // Size and seals, before anybody copies there.
  KVFERRY_TRY(ipc::SharedMemory::map_pool(memory.pool, memory.pool_bytes));
  KVFERRY_ASSIGN(ipc::PoolMemory own, memory.duplicate());
  Memory found{std::move(own.catalogue), std::move(mapping), memory.id, pool};
  std::unique_ptr<PoolCatalogue> opened(new PoolCatalogue(std::move(found)));
  if (!opened->is_whole(*opened->at<Header>(0))) {
    return KVFERRY_ERROR(kProtocol, "the catalogue of pool {} has a damaged header",
                         memory.id.hex());
  }
  for (std::uint32_t i = 0; i < catalogue::kRoots; ++i) {
    if (!opened->is_whole(*opened->root(i))) {
      opened->damaged_ += opened->root(i)->check != 0 ? 1U : 0U;
      store_check(opened->root(i)->check, 0);
    } else {
      opened->root_ids_.emplace(opened->root(i)->root, static_cast<std::uint16_t>(i));
      opened->know_root(i);
    }
  }
  for (std::uint32_t page = 0; page < pool.pages; ++page) {
    const Slab& record = *opened->slab(page);
    if (record.check != 0 && !opened->is_whole(record)) {
      return KVFERRY_ERROR(
          kProtocol,
          "the catalogue of pool {} has a damaged slab at page {}: where somebody may still write "
          "is not known",
          memory.id.hex(), page);
    }
  }
  for (std::uint32_t i = 0; i < catalogue::kUsers; ++i) {
    if (opened->user(i)->check != 0 && !opened->is_whole(*opened->user(i))) {
      return KVFERRY_ERROR(
          kProtocol,
          "the catalogue of pool {} has a damaged user: who may still write is not "
          "known",
          memory.id.hex());
    }
    if (opened->user(i)->check != 0) {
      opened->user_places_.emplace(opened->user(i)->incarnation, i);
    }
  }
  return opened;
}

void PoolCatalogue::store_check(std::uint64_t& check, std::uint64_t value) noexcept {
  std::atomic_ref(check).store(value, std::memory_order_release);
}

// A record is right in its own place alone.
std::uint64_t PoolCatalogue::seed(const void* record) const noexcept {
  return id_.low() ^
         static_cast<std::uint64_t>(static_cast<const std::byte*>(record) - mapping_.data());
}

template <typename T> bool PoolCatalogue::is_whole(const T& record) const noexcept {
  return record.check != 0 && record.check == check_value(record, seed(&record));
}

template <typename T> void PoolCatalogue::seal(T& record) noexcept {
  store_check(record.check, check_value(record, seed(&record)));
}

std::uint64_t PoolCatalogue::filled_bytes() const noexcept {
  const std::uint64_t filled =
      std::atomic_ref(at<Progress>(sizeof(Header))->filled_bytes).load(std::memory_order_relaxed);
  return std::min(filled, at<Header>(0)->pool_bytes);
}

void PoolCatalogue::set_filled(std::uint64_t bytes) noexcept {
  std::atomic_ref(at<Progress>(sizeof(Header))->filled_bytes)
      .store(bytes, std::memory_order_relaxed);
}

std::uint64_t PoolCatalogue::served_ns() const noexcept {
  return std::atomic_ref(at<Progress>(sizeof(Header))->served_ns).load(std::memory_order_relaxed);
}

void PoolCatalogue::set_served(ipc::TimePoint when) noexcept {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(when.time_since_epoch());
  std::atomic_ref(at<Progress>(sizeof(Header))->served_ns)
      .store(static_cast<std::uint64_t>(ns.count()), std::memory_order_relaxed);
}

std::vector<SlabPlace> PoolCatalogue::slabs() const {
  std::vector<SlabPlace> found;
  for (std::uint32_t page = 0; page < pages_; ++page) {
    const Slab& record = *slab(page);
    if (!is_whole(record)) continue;
    SlabPlace place;
    place.first_page = page;
    place.pages = record.pages;
    place.capacity = record.capacity;
    place.shard_base = record.shard_base;
    place.shard_stride = record.shard_stride;
    place.shape.fingerprint = record.fingerprint;
    place.shape.group = ipc::GroupId{record.group};
    place.shape.bytes = {record.replicated_bytes, record.shard_bytes};
    place.shape.ranks = record.ranks;
    // What is no number of parts stays none.
    place.shape.parts = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(record.parts, ipc::kMostUnitBlocks + std::uint64_t{1}));
    found.push_back(place);
  }
  return found;
}

std::vector<PoolCatalogue::FoundRoot> PoolCatalogue::roots() const {
  std::vector<FoundRoot> found;
  for (const auto& [digest, i] : root_ids_) {
    const Root& record = *root(i);
    found.push_back({digest, record.fingerprint, name_of(record),
                     name_in(record.name_space, record.name_space_bytes),
                     record.proof.is_zero() ? std::nullopt : std::optional(record.proof)});
  }
  return found;
}

std::vector<PoolCatalogue::FoundUser> PoolCatalogue::users() const {
  std::vector<FoundUser> found;
  for (const auto& [incarnation, i] : user_places_) {
    const User& record = *user(i);
    found.push_back({static_cast<pid_t>(record.pid), record.start_time, incarnation,
                     static_cast<catalogue::UserKind>(record.kind)});
  }
  return found;
}

Block* PoolCatalogue::block(const HostSlot& slot) const noexcept {
  if (slot.slab >= areas_.size() || areas_[slot.slab].records == nullptr) return nullptr;
  const Area& area = areas_[slot.slab];
  return reinterpret_cast<Block*>(area.records + slot.index * area.stride);
}

void PoolCatalogue::copy_record(const Block& record, std::uint32_t sums, RecordCopy& copy) {
  std::memcpy(static_cast<void*>(&copy), &record,
              sizeof(Block) + std::size_t{sums} * sizeof(std::uint64_t));
}

std::uint64_t PoolCatalogue::check_of(RecordCopy& copy,
                                      std::uint32_t sums,
                                      const Block& record) const noexcept {
  const std::uint32_t used = std::exchange(copy.record.used, 0);
  const std::size_t size = sizeof(Block) + std::size_t{sums} * sizeof(std::uint64_t);
  const std::uint64_t check =
      hash_of(reinterpret_cast<const std::byte*>(&copy) + sizeof(copy.record.check),
              size - sizeof(copy.record.check), seed(&record));
  copy.record.used = used;
  return check;
}

void PoolCatalogue::know_root(std::uint32_t place) {
  known_roots_[place] = {root(place)->root, root(place)->fingerprint};
}

const Root* PoolCatalogue::root_of(const Block& record) const {
  const Root* named = record.root < catalogue::kRoots ? root(record.root) : nullptr;
  return named != nullptr && is_whole(*named) ? named : nullptr;
}

void PoolCatalogue::note_user(const ipc::ProcessRef& process,
                              const ipc::IncarnationId& incarnation,
                              catalogue::UserKind kind) {
  const auto known = user_places_.find(incarnation);
  std::uint32_t place = known == user_places_.end() ? catalogue::kUsers : known->second;
  for (std::uint32_t i = 0; place == catalogue::kUsers && i < catalogue::kUsers; ++i) {
    if (user(i)->check == 0) place = i;
  }
  if (place == catalogue::kUsers) {
    ipc::log_warn(
        "more than {} processes copy to and from the pool: it cannot outlive this manager",
        catalogue::kUsers);
    // Whoever is not in it may still write when the next manager comes.
    store_check(at<Header>(0)->check, 0);
    return;
  }
  User& record = *user(place);
  if (known != user_places_.end() && record.pid == static_cast<std::uint32_t>(process.pid()) &&
      record.start_time == process.start_time()) {
    return;  // it comes again: at no moment is it not known
  }
  store_check(record.check, 0);
  record.pid = static_cast<std::uint32_t>(process.pid());
  record.kind = static_cast<std::uint32_t>(kind);
  record.start_time = process.start_time();
  record.incarnation = incarnation;
  seal(record);
  user_places_.insert_or_assign(incarnation, place);
}

void PoolCatalogue::forget_user(const ipc::IncarnationId& incarnation) {
  const auto known = user_places_.find(incarnation);
  if (known == user_places_.end()) return;
  store_check(user(known->second)->check, 0);
  user_places_.erase(known);
}

void PoolCatalogue::note_root(const FoundRoot& named) {
  const auto id = root_id(named.root);
  if (!id) return;
  Root& record = *root(*id);
  const ipc::Digest proof = named.proof.value_or(ipc::Digest{});
  if (record.fingerprint == named.fingerprint && name_of(record) == named.engine &&
      record.proof == proof &&
      name_in(record.name_space, record.name_space_bytes) == named.name_space) {
    return;
  }
  // While it is rewritten its blocks are nobody's; a manager that dies here loses them.
  store_check(record.check, 0);
  record.fingerprint = named.fingerprint;
  record.proof = proof;
  record.engine_bytes = write_name(record.engine, named.engine);
  record.name_space_bytes = write_name(record.name_space, named.name_space);
  seal(record);
  know_root(*id);
}

// The place of one that has no blocks any more is another one's.
std::optional<std::uint16_t> PoolCatalogue::root_id(const ipc::Digest& digest) {
  if (const auto known = root_ids_.find(digest); known != root_ids_.end()) return known->second;
  std::uint32_t place = catalogue::kRoots;
  for (std::uint32_t i = 0; place == catalogue::kRoots && i < catalogue::kRoots; ++i) {
    if (root(i)->check == 0) place = i;
  }
  if (place == catalogue::kRoots) {
    const auto unused = std::find_if(root_ids_.begin(), root_ids_.end(), [this](const auto& entry) {
      return blocks_of_root_[entry.second] == 0;
    });
    if (unused == root_ids_.end()) {
      if (!std::exchange(is_full_told_, true)) {
        ipc::log_warn(
            "the pool holds blocks of {} models and weights: those of others are lost "
            "with this manager",
            catalogue::kRoots);
      }
      return std::nullopt;
    }
    place = unused->second;
    root_ids_.erase(unused);
  }
  Root& record = *root(place);
  store_check(record.check, 0);
  record = Root{};
  record.root = digest;
  seal(record);
  know_root(place);
  root_ids_.emplace(digest, static_cast<std::uint16_t>(place));
  return static_cast<std::uint16_t>(place);
}

void PoolCatalogue::on_slab_opened(std::uint32_t id, const SlabPlace& place) {
  if (areas_.size() <= id) areas_.resize(id + 1);
  Area& area = areas_[id];
  const std::uint32_t sums = place.shape.sums();
  area = {nullptr, catalogue::record_bytes(sums), place.first_page,
          sums,    place.shape.ranks + 1,         place.shape.fingerprint};
  if (sums > catalogue::kMostSums ||
      place.capacity > place.pages * layout_.area_bytes / area.stride) {
    ipc::log_warn(
        "host blocks of {} in {} parts on {} ranks cannot be in the catalogue: the pool cannot "
        "outlive this manager",
        ipc::format_size(place.shape.block_bytes()), place.shape.parts, place.shape.ranks);
    // Nobody could tell afterwards which of them are being written.
    store_check(at<Header>(0)->check, 0);
    return;
  }
  area.records = mapping_.data() + layout_.areas + place.first_page * layout_.area_bytes;
  Slab& record = *slab(place.first_page);
  if (is_whole(record)) return;  // It was found there.
  // What lies there is of nobody: records of a slab that is closed are empty, others are damaged.
  for (std::uint32_t i = 0; i < place.capacity; ++i) {
    Block& block = *reinterpret_cast<Block*>(area.records + i * area.stride);
    if (block.check != 0) store_check(block.check, 0);
  }
  record = Slab{};
  record.pages = place.pages;
  record.capacity = place.capacity;
  record.group = place.shape.group.value;
  record.ranks = place.shape.ranks;
  record.parts = place.shape.parts;
  record.replicated_bytes = place.shape.bytes.replicated_bytes;
  record.shard_bytes = place.shape.bytes.shard_bytes;
  record.shard_base = place.shard_base;
  record.shard_stride = place.shard_stride;
  record.fingerprint = place.shape.fingerprint;
  seal(record);
}

void PoolCatalogue::on_slab_closed(std::uint32_t id) {
  if (areas_[id].records != nullptr) store_check(slab(areas_[id].first_page)->check, 0);
  areas_[id] = {};
}

void PoolCatalogue::on_taken(const HostSlot& slot) {
  Block* record = block(slot);
  if (record == nullptr) return;
  const bool lacked = lacks_sums(*record);
  store_check(record->check, 0);
  *record = Block{};
  record->state = BlockState::kTaken;
  seal_block(slot, *record);
  count(lacked, *record);
}

void PoolCatalogue::on_freed(const HostSlot& slot) {
  Block* record = block(slot);
  if (record == nullptr) return;
  let_root_go(*record);
  const bool lacked = lacks_sums(*record);
  store_check(record->check, 0);
  record->state = BlockState::kNone;
  count(lacked, *record);
}

void PoolCatalogue::count(bool lacked, const Block& record) noexcept {
  if (lacks_sums(record) && !lacked) ++unsummed_;
  // The memory is also others': what they write there is not to make it wrap.
  if (lacked && !lacks_sums(record) && unsummed_ > 0) --unsummed_;
}

void PoolCatalogue::let_root_go(const Block& record) {
  const bool has_one =
      record.state == BlockState::kVisible || record.state == BlockState::kSequence;
  if (has_one && record.root < catalogue::kRoots && blocks_of_root_[record.root] > 0) {
    --blocks_of_root_[record.root];
  }
}

void PoolCatalogue::seal_block(const HostSlot& slot, Block& record) {
  RecordCopy copy;
  copy_record(record, areas_[slot.slab].sums, copy);
  store_check(record.check, check_of(copy, areas_[slot.slab].sums, record));
}

void PoolCatalogue::on_visible(const HostSlot& slot,
                               const ipc::BlockKey& key,
                               const ipc::Digest& before,
                               std::span<const std::uint64_t> sums) {
  Block* record = block(slot);
  if (record == nullptr) return;
  const bool was_visible =
      record->state == BlockState::kVisible && record->root < catalogue::kRoots;
  const auto id = was_visible ? std::optional(record->root) : root_id(key.root);
  if (!id) return;
  const bool lacked = lacks_sums(*record);
  store_check(record->check, 0);
  record->block = key.block;
  record->before = before;
  record->root = *id;
  record->state = BlockState::kVisible;
  record->sums = SumsState::kNone;
  if (sums.size() == areas_[slot.slab].sums) {
    record->sums = SumsState::kKnown;
    std::copy(sums.begin(), sums.end(), sums_of(*record));
  }
  seal_block(slot, *record);
  count(lacked, *record);
  if (!was_visible) ++blocks_of_root_[*id];
}

void PoolCatalogue::on_summed(const HostSlot& slot, std::span<const std::uint64_t> sums) {
  Block* record = block(slot);
  if (record == nullptr || sums.size() != areas_[slot.slab].sums ||
      (record->state != BlockState::kVisible && record->state != BlockState::kSequence)) {
    return;
  }
  // Sealed anew, what is damaged would be whole again.
  if (!is_whole_at(slot)) return;
  const bool lacked = lacks_sums(*record);
  store_check(record->check, 0);
  record->sums = SumsState::kKnown;
  std::copy(sums.begin(), sums.end(), sums_of(*record));
  seal_block(slot, *record);
  count(lacked, *record);
}

void PoolCatalogue::on_awaited(const HostSlot& slot, ipc::JobId job, std::uint64_t parts) {
  Block* record = block(slot);
  // There are two checksums at least.
  if (record == nullptr || record->state != BlockState::kVisible ||
      record->sums == SumsState::kKnown || !is_whole_at(slot)) {
    return;
  }
  store_check(record->check, 0);
  record->sums = SumsState::kAwaited;
  sums_of(*record)[0] = job.value;
  sums_of(*record)[1] = parts;
  seal_block(slot, *record);
}

std::span<const std::uint64_t> PoolCatalogue::sums(const HostSlot& slot) const {
  Block* record = block(slot);
  if (record == nullptr || record->sums != SumsState::kKnown) return {};
  return {sums_of(*record), areas_[slot.slab].sums};
}

void PoolCatalogue::on_used(const HostSlot& slot, std::uint32_t when) {
  if (Block* record = block(slot); record != nullptr) record->used = when;
}

void PoolCatalogue::on_sequence(const HostSlot& slot,
                                const ipc::Digest& root,
                                const ipc::IncarnationId& owner,
                                std::uint64_t handle,
                                std::uint32_t index) {
  Block* record = block(slot);
  if (record == nullptr || record->state != BlockState::kTaken) return;
  const auto id = root_id(root);
  if (!id) return;
  store_check(record->check, 0);
  record->block = owner;
  record->before = ipc::Digest::from_words(handle, index);
  record->root = *id;
  record->state = BlockState::kSequence;
  seal_block(slot, *record);
  ++blocks_of_root_[*id];
}

void PoolCatalogue::forget_slab(std::uint32_t first_page) {
  store_check(slab(first_page)->check, 0);
}

void PoolCatalogue::on_hidden(const HostSlot& slot) {
  Block* record = block(slot);
  if (record == nullptr ||
      (record->state != BlockState::kVisible && record->state != BlockState::kSequence)) {
    return;
  }
  let_root_go(*record);
  on_taken(slot);
}

}  // namespace kvferry::cache_manager
