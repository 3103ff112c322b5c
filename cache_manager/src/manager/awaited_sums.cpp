// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/awaited_sums.hpp"

#include "kvferry/ipc/base/checksum.hpp"

#include <algorithm>
#include <span>
#include <unordered_map>

namespace kvferry::cache_manager {

AwaitedSums::Awaited& AwaitedSums::open(ipc::JobId job) {
  if (!jobs_.contains(job)) {
    while (!order_.empty() && (order_.size() >= kMostJobs || blocks_ >= kMostBlocks ||
                               !jobs_.contains(order_.front()))) {
      erase(order_.front());
      order_.pop_front();
    }
    order_.push_back(job);
  }
  return jobs_[job];
}

void AwaitedSums::add(const Job& job, const HostPool& pool) {
  if (std::none_of(job.items.begin(), job.items.end(),
                   [](const JobItem& item) { return item.result == 0; })) {
    erase(job.id);
    return;
  }
  Awaited& awaited = open(job.id);
  awaited.has_ended = true;
  std::unordered_map<const HostBlock*, std::uint32_t> places;  // Of units that have several parts.
  for (const JobItem& item : job.items) {
    if (item.host == nullptr) continue;
    const SlabShape& shape = pool.shape(item.host->slot());
    const auto [place, is_new] =
        places.emplace(item.host.get(), static_cast<std::uint32_t>(awaited.blocks.size()));
    if (is_new) {
      Block& block = awaited.blocks.emplace_back();
      if (item.result == 0) {
        block.block = item.host;
        block.sums.assign(shape.sums(), 0);
      }
    }
    await_part(awaited, {place->second, item.part * (shape.ranks + 1)}, job, item, shape);
  }
  blocks_ += awaited.blocks.size();
  awaited.ranks_left = static_cast<std::size_t>(std::count_if(
      awaited.sent.begin(), awaited.sent.end(), [](const auto& sent) { return !sent.empty(); }));
  for (const auto& [rank, sums] : std::exchange(awaited.early, {})) apply(awaited, rank, sums);
  erase_if_over(job.id);
}

void AwaitedSums::await_part(Awaited& awaited,
                             const Sent& sent,
                             const Job& job,
                             const JobItem& item,
                             const SlabShape& shape) {
  Block& block = awaited.blocks[sent.block];
  if (!block.sums.empty()) {
    const std::uint64_t of_nothing = ipc::checksum({});
    const auto sums = std::span(block.sums).subspan(sent.first_sum, shape.ranks + std::size_t{1});
    std::fill(sums.begin(), sums.end(), shape.bytes.shard_bytes == 0 ? of_nothing : 0);
    sums.front() = shape.bytes.replicated_bytes == 0 ? of_nothing : 0;
    block.left += static_cast<std::size_t>(std::count(sums.begin(), sums.end(), 0));
  }
  awaited.sent.resize(std::max<std::size_t>(awaited.sent.size(), shape.ranks));
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    if (has_part(item, shape, job.to_host(), rank)) awaited.sent[rank].push_back(sent);
  }
}

void AwaitedSums::told(std::uint32_t rank, ipc::MoverSums sums, bool is_under_way) {
  const ipc::JobId job = sums.job;
  if (!is_under_way && !jobs_.contains(job)) return;
  Awaited& awaited = open(job);
  if (!awaited.has_ended) {
    awaited.early.insert_or_assign(rank, std::move(sums));
    return;
  }
  apply(awaited, rank, sums);
  erase_if_over(job);
}

// What a mover says of blocks that it was not asked about counts for nothing.
void AwaitedSums::apply(Awaited& awaited, std::uint32_t rank, const ipc::MoverSums& sums) {
  if (rank >= awaited.sent.size()) return;
  const std::vector<Sent> sent = std::exchange(awaited.sent[rank], {});
  if (sent.empty() || sums.shard.size() != sent.size() || sums.replicated.size() != sent.size()) {
    return;
  }
  --awaited.ranks_left;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    Block& block = awaited.blocks[sent[i].block];
    if (block.sums.empty()) continue;  // it failed
    const auto put = [&block](std::size_t at, std::uint64_t sum) {
      if (sum == 0) return;
      if (block.sums.at(at) == 0) --block.left;
      block.sums.at(at) = sum;
    };
    put(sent[i].first_sum, sums.replicated[i]);
    put(sent[i].first_sum + rank + 1, sums.shard[i]);
    if (block.left > 0) continue;
    if (const HostBlockRef held = block.block.lock()) on_known_(held->slot(), block.sums);
    block.block.reset();
  }
}

void AwaitedSums::erase_if_over(ipc::JobId job) {
  const auto at = jobs_.find(job);
  if (at != jobs_.end() && at->second.has_ended && at->second.ranks_left == 0) erase(job);
}

void AwaitedSums::erase(ipc::JobId job) {
  const auto at = jobs_.find(job);
  if (at == jobs_.end()) return;
  blocks_ -= at->second.blocks.size();
  jobs_.erase(at);
}

}  // namespace kvferry::cache_manager
