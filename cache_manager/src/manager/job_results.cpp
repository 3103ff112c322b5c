// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What becomes of the host blocks of jobs that have ended.
#include "manager/job_service.hpp"

#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

std::uint8_t result_code(ipc::ErrorCode code) { return static_cast<std::uint8_t>(code); }

}  // namespace

bool JobService::must_not_load(const HostBlock& block) const {
  return context_.config.verify_loads == VerifyLoads::kAlways &&
         context_.catalogue.sums(block.slot()).empty();
}

// A mover that tells no checksums with its answer, or a pool that has more models than it knows:
// blocks without any are none to an engine that wants all of them checked.
bool JobService::set_sums(const HostBlock& block, JobItem& item) {
  if (must_not_load(block)) {
    ++context_.integrity.unchecked;
    item.result = result_code(ipc::ErrorCode::kNotFound);
    return false;
  }
  const VerifyLoads policy = context_.config.verify_loads;
  const bool is_in_sample = ++loads_ % ManagerConfig::kSample == 0;
  if (!block.is_doubted(item.part) && policy != VerifyLoads::kAlways &&
      (policy == VerifyLoads::kOff || !is_in_sample)) {
    return true;
  }
  const auto sums = context_.catalogue.sums(block.slot());
  if (sums.empty()) {
    if (context_.config.checksums) ++context_.integrity.unchecked;
    return true;
  }
  const std::size_t count = context_.pool.shape(block.slot()).ranks + std::size_t{1};
  const auto of_part = sums.subspan(item.part * count, count);
  item.sums.assign(of_part.begin(), of_part.end());
  return true;
}

// A damaged block is a miss from now on, and for this load, too.
void JobService::end_load(Job& job) {
  for (JobItem& item : job.items) {
    if (item.sums.empty()) continue;
    if (item.result == 0) {
      ++context_.integrity.checked;
      item.host->trust(item.part);
    } else if (item.result == result_code(ipc::ErrorCode::kCorrupt)) {
      ++context_.integrity.checked;
      ++context_.integrity.corrupt;
      ipc::log_error("block {} of slab {} in the host pool is damaged: dropped",
                     item.host->slot().index, item.host->slot().slab);
      item.result = result_code(ipc::ErrorCode::kNotFound);
      if (job.kind == JobKind::kLoad) {
        // It was taken for a hit when the load came.
        if (NamespaceAccount* account = item.host->account()) {
          --account->counters.hits;
          ++account->counters.misses;
        }
        context_.index.drop_block(*item.host);
      } else {
        context_.sequences.drop_block(job.sequence_key(), *item.host);
      }
    }
  }
}

void JobService::commit_store(Job& job) {
  // A unit is whole, or it is not there: what fails one part of it fails all.
  std::unordered_map<PrefixIndex::Token, std::uint8_t> failed;
  for (const JobItem& item : job.items) {
    if (item.result != 0) failed.emplace(item.token, item.result);
  }
  std::vector<PrefixIndex::Token> tokens;
  std::unordered_map<PrefixIndex::Token, std::size_t> places;  // Among those.
  for (JobItem& item : job.items) {
    if (const auto at = failed.find(item.token); at != failed.end()) {
      context_.index.discard(item.token);
      item.result = item.result == 0 ? at->second : item.result;
    } else if (places.emplace(item.token, tokens.size()).second) {
      tokens.push_back(item.token);
    }
  }
  const std::vector<bool> was_there = context_.index.commit(tokens);
  for (JobItem& item : job.items) {
    if (item.result != 0 || was_there[places.at(item.token)]) continue;
    item.result = result_code(ipc::ErrorCode::kRevoked);
    if (job.message.empty()) {
      job.message = "the host tier was cleared while the block was stored";
    }
  }
}

void JobService::commit_swap_out(Job& job) {
  const ClientRecord* client = context_.directory.client(job.client);
  for (JobItem& item : job.items) {
    if (item.result == 0 && !context_.sequences.put(job.sequence_key(), job.sequence_life,
                                                    item.group, item.sequence_index, item.host)) {
      item.result = result_code(ipc::ErrorCode::kRevoked);
      if (job.message.empty()) {
        job.message = "the sequence was dropped while it was swapped out";
      }
    } else if (item.result == 0 && client != nullptr) {
      context_.catalogue.on_sequence(item.host->slot(), client->root, job.client, job.sequence,
                                     item.sequence_index);
    }
  }
  context_.sequences.drop_if_empty(job.sequence_key());
}

void JobService::note_awaited(const Job& job) {
  const HostBlock* noted = nullptr;
  for (const JobItem& item : job.items) {
    if (item.result != 0 || item.host == nullptr || item.host.get() == noted) continue;
    noted = item.host.get();  // parts of a unit are mostly neighbours
    context_.catalogue.on_awaited(item.host->slot(), job.id, item.host->parts());
  }
}

void JobService::summed(std::uint32_t rank, ipc::MoverSums sums) {
  const bool is_under_way = context_.jobs.is_unfinished(sums.job);
  sums_.told(rank, std::move(sums), is_under_way);
}

}  // namespace kvferry::cache_manager
