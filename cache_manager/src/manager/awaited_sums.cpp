// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/awaited_sums.hpp"

#include "kvferry/ipc/base/checksum.hpp"

#include <algorithm>

namespace kvferry::cache_manager {

AwaitedSums::Awaited& AwaitedSums::open(ipc::JobId job) {
  if (!jobs_.contains(job)) {
    while (order_.size() >= kMostJobs) {
      jobs_.erase(order_.front());
      order_.pop_front();
    }
    order_.push_back(job);
  }
  return jobs_[job];
}

void AwaitedSums::add(const Job& job, const HostPool& pool) {
  Awaited& awaited = open(job.id);
  awaited.has_ended = true;
  const std::uint64_t of_nothing = ipc::checksum({});
  for (const JobItem& item : job.items) {
    Block& block = awaited.blocks.emplace_back();
    if (item.host == nullptr) continue;
    const SlabShape& shape = pool.shape(item.host->slot());
    if (item.result == 0) block.block = item.host;
    block.sums.assign(shape.ranks + 1, shape.bytes.shard_bytes == 0 ? of_nothing : 0);
    block.sums.front() = shape.bytes.replicated_bytes == 0 ? of_nothing : 0;
    awaited.sent.resize(std::max<std::size_t>(awaited.sent.size(), shape.ranks));
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      if (has_part(item, shape, job.to_host(), rank)) {
        awaited.sent[rank].push_back(static_cast<std::uint32_t>(awaited.blocks.size() - 1));
      }
    }
  }
  awaited.ranks_left = static_cast<std::size_t>(std::count_if(
      awaited.sent.begin(), awaited.sent.end(), [](const auto& sent) { return !sent.empty(); }));
  for (const auto& [rank, sums] : std::exchange(awaited.early, {})) apply(awaited, rank, sums);
  erase_if_over(job.id);
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
  const std::vector<std::uint32_t> sent = std::exchange(awaited.sent[rank], {});
  if (sent.empty() || sums.shard.size() != sent.size() || sums.replicated.size() != sent.size()) {
    return;
  }
  --awaited.ranks_left;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    Block& block = awaited.blocks[sent[i]];
    if (sums.replicated[i] != 0) block.sums.front() = sums.replicated[i];
    if (sums.shard[i] != 0) block.sums.at(rank + 1) = sums.shard[i];
    if (std::find(block.sums.begin(), block.sums.end(), 0) != block.sums.end()) continue;
    if (const HostBlockRef held = block.block.lock()) on_known_(held->slot(), block.sums);
    block.block.reset();
  }
}

void AwaitedSums::erase_if_over(ipc::JobId job) {
  const auto at = jobs_.find(job);
  if (at != jobs_.end() && at->second.has_ended && at->second.ranks_left == 0) jobs_.erase(at);
}

}  // namespace kvferry::cache_manager
