// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A pool's catalogue as an earlier manager left it, or anybody who has its descriptor: whatever is
// in it, the next manager gets slabs that lie in the pool and do not meet, or nothing.
#include "manager/pool_catalogue.hpp"

#include "fuzz.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace kvferry::fuzz {
namespace {

using cache_manager::HostPool;
using cache_manager::HostSlot;
using cache_manager::PoolCatalogue;
using cache_manager::SlabPlace;
namespace format = cache_manager::catalogue;

constexpr std::uint64_t kPool = 64ULL * 4096;

ipc::UniqueFd duplicate(const ipc::UniqueFd& fd) {
  return ipc::UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
}

void check_slot(const HostPool& pool, const HostSlot& slot) {
  const cache_manager::SlabShape& shape = pool.shape(slot);
  for (const std::uint32_t rank : {0U, shape.ranks - 1}) {
    const auto at = pool.offsets(slot, ipc::Rank{rank});
    KVFERRY_CHECK(at.replicated + shape.bytes.replicated_bytes <= kPool, "beyond the pool");
    KVFERRY_CHECK(at.shard + shape.bytes.shard_bytes <= kPool, "beyond the pool");
  }
}

/// Slabs that the bytes say, past all checks.
void adopt_places(std::span<const std::uint8_t> bytes) {
  HostPool pool(kPool);
  while (bytes.size() >= sizeof(format::Slab)) {
    format::Slab record{};
    std::memcpy(&record, bytes.data(), sizeof(record));
    bytes = bytes.subspan(sizeof(record));
    SlabPlace place;
    place.first_page = static_cast<std::uint32_t>(record.check);
    place.pages = record.pages;
    place.capacity = record.capacity;
    place.shard_base = record.shard_base;
    place.shard_stride = record.shard_stride;
    place.shape.ranks = record.ranks;
    place.shape.bytes = {record.replicated_bytes, record.shard_bytes};
    const auto slab = pool.adopt(place);
    if (!slab) continue;
    check_slot(pool, pool.adopt_slot(*slab, 0));
    if (place.capacity > 1) check_slot(pool, pool.adopt_slot(*slab, place.capacity - 1));
  }
}

/// A catalogue whose memory is overwritten with the bytes from some place on.
void read_memory(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < sizeof(std::uint32_t)) return;
  std::uint32_t at = 0;
  std::memcpy(&at, bytes.data(), sizeof(at));
  bytes = bytes.subspan(sizeof(at));
  const HostPool::Stats stats = HostPool(kPool).stats();
  static const std::unique_ptr<PoolCatalogue> catalogue =
      PoolCatalogue::create(stats, ipc::Digest::from_words(1, 1)).value();
  static const ipc::SharedMapping memory =
      ipc::SharedMemory::map_pool(catalogue->fd(), catalogue->size_bytes()).value();
  static const std::vector<std::byte> clean(memory.data(), memory.data() + memory.size_bytes());
  static const ipc::UniqueFd pool_fd =
      ipc::SharedMemory::create_pool("kvferry-fuzz", kPool, false).value();
  std::copy(clean.begin(), clean.end(), memory.data());
  at %= static_cast<std::uint32_t>(clean.size());
  std::memcpy(memory.data() + at, bytes.data(), std::min(bytes.size(), clean.size() - at));
  ipc::PoolMemory kept;
  kept.id = ipc::Digest::from_words(1, 1);
  kept.pool_bytes = kPool;
  kept.catalogue_bytes = catalogue->size_bytes();
  kept.pool = duplicate(pool_fd);
  kept.catalogue = duplicate(catalogue->fd());
  const auto opened = PoolCatalogue::open(kept, stats);
  if (!opened) return;
  HostPool pool(kPool);
  pool.observe(opened->get());
  (void)(*opened)->roots();
  (void)(*opened)->users();
  for (const SlabPlace& place : (*opened)->slabs()) {
    const auto slab = pool.adopt(place);
    if (!slab) continue;
    for (std::uint32_t i = 0; i < place.capacity; ++i) {
      (void)(*opened)->state(*slab, i);
      if ((*opened)->adopt(*slab, i).state == format::BlockState::kNone) continue;
      const HostSlot slot = pool.adopt_slot(*slab, i);
      check_slot(pool, slot);
      (void)(*opened)->find(slot);
      (void)(*opened)->find_sequence(slot);
    }
  }
  pool.observe(nullptr);
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::adopt_places({data, size});
  fuzz::read_memory({data, size});
  return 0;
}
