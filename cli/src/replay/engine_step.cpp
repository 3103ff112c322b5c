// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "replay/engine.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::cli {
namespace {

using ipc::ErrorCode;
using std::chrono_literals::operator""ms;

constexpr ipc::Duration kRefusedPause = 10ms;
constexpr std::uint32_t kMaxFailures = 5;
constexpr std::uint64_t kNamedCorruptions = 5;

/// The arena or the worker went away under the step: served again once it is back.
bool is_passing(ErrorCode code) {
  switch (code) {
    case ErrorCode::kStaleEpoch:
    case ErrorCode::kNotReady:
    case ErrorCode::kRevoked:
    case ErrorCode::kPeerDied:
    case ErrorCode::kBusy:
    case ErrorCode::kCancelled: return true;
    default: return false;
  }
}

}  // namespace

std::uint64_t seed_of(const ipc::Digest& hash, ipc::GroupId group) noexcept {
  return hash.low() ^ (hash.high() * 0x9E3779B97F4A7C15ULL) ^
         ((group.value + 1ULL) * 0xD6E8FEB86659FD93ULL);
}

void Engine::start_step(AttemptId id, Attempt& attempt) {
  if (holds_back(id, attempt)) return;
  ipc::Step step;
  step.decode_steps = options_.decode_steps;
  const auto add = [&step](const HeldBlock& held, bool fill) {
    if (fill) {
      step.fills.push_back(ipc::SeededItem{held.group, held.block, seed_of(held.hash, held.group)});
    }
    step.reads.push_back(ipc::StepBlock{held.group, held.block});
  };
  for (const HeldBlock& held : attempt.blocks) add(held, held.source == BlockSource::kNowhere);
  for (const HeldBlock& held : attempt.outputs) add(held, true);
  for (const std::size_t i : attempt.verifying) {
    const HeldBlock& held = attempt.blocks[i];
    step.verifies.push_back(
        ipc::SeededItem{held.group, held.block, seed_of(held.hash, held.group)});
  }
  attempt.mismatches.assign(attempt.verifying.size(), 0);
  attempt.begun_at = ipc::MonotonicClock::now();
  attempt.computed_blocks = 0;
  for (const HeldBlock& held : attempt.blocks) {
    // Places of the prefix, not blocks of groups.
    if (held.group.value == 0 && held.source == BlockSource::kNowhere) ++attempt.computed_blocks;
  }
  for (std::size_t r = 0; r < channels_.size(); ++r) {
    step.session = arenas_[r].session;
    step.epoch = arenas_[r].epoch;
    const ipc::Status sent = channels_[r]->send(
        step,
        [this, id](ipc::Result<ipc::StepReply> reply) { on_step_done(id, std::move(reply)); });
    if (sent) {
      ++attempt.ranks_outstanding;
    } else if (!attempt.error) {
      attempt.error = sent.error();
    }
  }
  if (attempt.ranks_outstanding == 0) {
    loop_.post([this, alive = alive_, id] {
      if (*alive && attempts_.contains(id)) finish_step(id);
    });
  }
}

void Engine::on_step_done(AttemptId id, ipc::Result<ipc::StepReply> reply) {
  const auto found = attempts_.find(id);
  KVFERRY_CHECK(found != attempts_.end(), "an attempt ended before its steps did");
  Attempt& attempt = found->second;
  progress_at_ = ipc::MonotonicClock::now();
  if (!reply) {
    // The reason counts, not its echo from a rank that was refused for it.
    if (!attempt.error || is_passing(attempt.error->code)) attempt.error = reply.error();
  } else if (reply->mismatches.size() != attempt.mismatches.size()) {
    attempt.error = KVFERRY_ERROR(kProtocol, "a worker verified {} blocks, asked for {}",
                                  reply->mismatches.size(), attempt.mismatches.size());
  } else {
    for (std::size_t i = 0; i < attempt.mismatches.size(); ++i) {
      attempt.mismatches[i] += reply->mismatches[i];
    }
  }
  if (--attempt.ranks_outstanding == 0) finish_step(id);
}

void Engine::finish_step(AttemptId id) {
  Attempt& attempt = attempts_.at(id);
  if (attempt.doomed) {
    end_attempt(id);
    return;
  }
  if (!attempt.error) {
    choice_.on_computed(attempt.computed_blocks * kTraceBlockTokens, attempt.begun_at,
                        ipc::MonotonicClock::now());
    finish_request(attempt);
    end_attempt(id);
    return;
  }
  const ipc::Error error = *attempt.error;
  if (!is_passing(error.code) && ++failures_[attempt.request] >= kMaxFailures) {
    fail(KVFERRY_ERROR(kInvalidArgument, "request {} failed {} times: {}", attempt.request + 1,
                       kMaxFailures, error.to_string()));
    return;
  }
  ipc::log_debug("request {} is put back: {}", attempt.request + 1, error.to_string());
  put_back(attempt);
  end_attempt(id);
  not_before_ = ipc::MonotonicClock::now() + kRefusedPause;
  loop_.after(kRefusedPause, [this, alive = alive_] {
    if (*alive) pump_later();
  });
}

void Engine::finish_request(Attempt& attempt) {
  check_verified(attempt);
  for (const HeldBlock& held : attempt.blocks) {
    if (held.announced) index_of(held.group).make_valid(held.block, worker_deaths_);
  }
  count_hits(attempt);
  store_blocks(attempt);
  failures_.erase(attempt.request);
  hashes_.erase(attempt.request);
  ++counters_.requests;
  hooks_.on_request_done(counters_.requests);
}

void Engine::check_verified(Attempt& attempt) {
  counters_.blocks_verified += attempt.verifying.size();
  for (std::size_t i = 0; i < attempt.verifying.size(); ++i) {
    if (attempt.mismatches[i] == 0) continue;
    HeldBlock& held = attempt.blocks[attempt.verifying[i]];
    held.announced = false;
    index_of(held.group).forget(held.block);
    if (++counters_.blocks_corrupt > kNamedCorruptions) continue;
    hooks_.say(fmt::format(
        "CORRUPT: request {}, block {} of its prefix, group '{}', device block {} ({}): {} words "
        "differ",
        attempt.request + 1, held.position, options_.geometry.groups[held.group.value].name,
        held.block.value,
        held.source == BlockSource::kHost ? "loaded from the host" : "kept on the device",
        attempt.mismatches[i]));
  }
}

void Engine::count_hits(const Attempt& attempt) {
  // A block that had to be computed again ends the hit, like any miss.
  std::uint32_t hit = attempt.hit_blocks;
  for (const HeldBlock& held : attempt.blocks) {
    if (held.source == BlockSource::kNowhere) hit = std::min(hit, held.position);
  }
  for (std::uint32_t i = 0; i < hit; ++i) {
    ++(attempt.hit_from_host[i] ? counters_.hits_host : counters_.hits_device);
  }
  for (const HeldBlock& held : attempt.blocks) {
    if (held.survived) ++counters_.blocks_survived;
  }
  counters_.block_references += requests_[attempt.request].hash_ids.size();
}

void Engine::release(const Attempt& attempt) {
  if (attempt.era != era_) return;
  for (const HeldBlock& held : attempt.outputs) index_of(held.group).release(held.block);
  for (std::size_t i = attempt.blocks.size(); i-- > 0;) {
    index_of(attempt.blocks[i].group).release(attempt.blocks[i].block);
  }
}

void Engine::put_back(Attempt& attempt) {
  attempt.doomed = true;
  ++counters_.retracted;
  waiting_.insert(attempt.request);
  begun_.insert(attempt.request);
}

void Engine::end_attempt(AttemptId id) {
  const auto found = attempts_.find(id);
  KVFERRY_CHECK(found != attempts_.end(), "an attempt ended twice");
  release(found->second);
  pins_.let_go(std::move(found->second.pinned));
  attempts_.erase(found);
  pump_later();
}

}  // namespace kvferry::cli
