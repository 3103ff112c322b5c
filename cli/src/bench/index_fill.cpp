// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/index_fill.hpp"

#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kStoreOrderSeed = 1;
constexpr std::uint64_t kStoresAtATime = 64;

}  // namespace

void must_be_ok(const worker::Completion& completion) {
  if (completion.all_ok()) return;
  const auto wrong = std::find_if(completion.results.begin(), completion.results.end(),
                                  [](std::uint8_t code) { return code != 0; });
  throw ipc::Exception(ipc::Error{static_cast<ipc::ErrorCode>(*wrong), completion.message});
}

IndexFill::IndexFill(BenchContext& context,
                     BenchInstance& instance,
                     std::uint64_t prefixes,
                     Locality locality)
    : context_(context), instance_(instance), order_(prefixes * kPrefixBlocks) {
  std::iota(order_.begin(), order_.end(), std::uint64_t{0});
  if (locality == Locality::kSequential) return;
  std::shuffle(order_.begin(), order_.end(), std::mt19937_64(kStoreOrderSeed));
}

void IndexFill::run(std::string_view name, const std::function<void()>& between) {
  for (std::uint64_t first = 0; first < order_.size(); first += kStoreBlocks) {
    if (first / kStoreBlocks % kStoresAtATime == 0) between();
    context_.doing(fmt::format("{}: {} of {} entries stored", name, first, order_.size()));
    store(first, std::min<std::uint64_t>(kStoreBlocks, order_.size() - first));
  }
}

std::vector<worker::Digest> IndexFill::hashes_of(std::uint64_t prefix, std::uint32_t count) {
  std::vector<worker::Digest> hashes(count);
  for (std::uint32_t i = 0; i < count; ++i) hashes[i] = hash_of(prefix, i);
  return hashes;
}

void IndexFill::store(std::uint64_t first, std::uint64_t count) {
  std::vector<worker::StoreTarget> targets;
  for (std::uint64_t i = first; i < first + count; ++i) {
    const std::uint64_t prefix = order_[i] / kPrefixBlocks;
    const std::uint64_t place = order_[i] % kPrefixBlocks;
    targets.push_back({ipc::GroupId{0}, hash_of(prefix, place),
                       place == 0 ? worker::Digest{} : hash_of(prefix, place - 1)});
  }
  const auto slots = must(instance_.client().reserve_store(targets, ipc::Deadline::after(kAnswer)));
  std::vector<worker::StoreItem> items;
  for (std::uint32_t i = 0; i < slots.size(); ++i) {
    if (slots[i].outcome != worker::Reservation::kReserved) {
      throw ipc::Exception(
          KVFERRY_ERROR(kNoHostMemory, "the host pool has no room for entry {}", first + i));
    }
    items.push_back({ipc::GroupId{0}, ipc::BlockId{i}, slots[i].slot});
  }
  const worker::JobId job = must(instance_.client().submit_store(items));
  // wait: a store of the bench's own instance; kAnswer; the manager's end, which ends its jobs
  for (const worker::Completion& done :
       must(instance_.client().wait({&job, 1}, ipc::Deadline::after(kAnswer)))) {
    must_be_ok(done);
  }
}

}  // namespace kvferry::cli
