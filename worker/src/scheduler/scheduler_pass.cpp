// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "scheduler/model_input.hpp"
#include "scheduler/scheduler.hpp"

#include <utility>

/// The batch: one pass of the model after the other, over all ranks.
namespace kvferry::worker {

using ipc::ErrorCode;
using std::chrono_literals::operator""ms;

namespace {

constexpr ipc::Duration kRefusedPause = 10ms;
constexpr std::uint64_t kPrefillTokens = 8;

/// The arena or a worker went away under the pass: computed again once it is back.
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

void Scheduler::start_pass() {
  const PassLimits limits;
  ipc::Decode work;
  Pass pass;
  const std::vector<Number> candidates(admitted_.begin(), admitted_.end());
  for (const Number number : candidates) {
    // Making room for an earlier one may have put it back.
    if (!admitted_.contains(number)) continue;
    Sequence& sequence = sequences_.at(number);
    if (sequence.fate != Sequence::Fate::kGoesOn && !sequence.in_flight()) {
      settle(number);
      continue;
    }
    if (sequence.state != Sequence::State::kReady || !make_room_for(sequence)) continue;
    if (!add_to_pass(config_.geometry, limits, sequence, work)) break;
    sequence.state = Sequence::State::kRunning;
    pass.tokens += sequence.planned - sequence.computed;
    pass.batch.push_back(number);
  }
  if (pass.batch.empty()) return;
  pass.outputs.assign(pass.batch.size(), 0);
  pass.begun = ipc::MonotonicClock::now();
  pass_ = std::move(pass);
  for (std::size_t r = 0; r < channels_.size(); ++r) {
    work.session = arenas_[r].session;
    work.epoch = arenas_[r].epoch;
    const ipc::Status sent = channels_[r]->send(
        work, [this](const ipc::Result<ipc::DecodeReply>& reply) { on_rank_done(reply); });
    if (sent) {
      ++pass_->ranks_outstanding;
    } else if (!pass_->error) {
      pass_->error = sent.error();
    }
  }
  if (pass_->ranks_outstanding > 0) return;
  loop_.post([this, alive = alive_] {
    if (*alive) finish_pass();
  });
}

/// Prefetches end, then the youngest of the batch give their blocks up, itself as the last. Unless
/// blocks come back that are only read, to be evicted: it runs in a later pass.
bool Scheduler::make_room_for(Sequence& sequence) {
  while (!cache_.extend(sequence)) {
    if (!prefetched_.empty()) {
      end_prefetch(prefetched_.rbegin()->first);
      continue;
    }
    if (is_writing_back() && manager_answers()) return false;
    Number youngest = 0;
    for (const Number number : admitted_) {
      if (sequences_.at(number).state == Sequence::State::kReady) youngest = number;
    }
    KVFERRY_CHECK(youngest != 0, "a sequence that is to run is not in the batch");
    ipc::log_debug("scheduler: request {} is put back for want of blocks", youngest);
    const bool itself = youngest == sequence.number;
    retract(sequences_.at(youngest));
    if (itself) return false;
  }
  return true;
}

void Scheduler::on_rank_done(ipc::Result<ipc::DecodeReply> reply) {
  KVFERRY_CHECK(pass_.has_value(), "a rank answered a pass that is over");
  Pass& pass = *pass_;
  if (!reply) {
    // The reason counts, not its echo from a rank that was refused for it.
    if (!pass.error || is_passing(pass.error->code)) pass.error = reply.error();
  } else if (reply->outputs.size() != pass.outputs.size()) {
    pass.error = KVFERRY_ERROR(kProtocol, "a rank computed {} outputs, asked for {}",
                               reply->outputs.size(), pass.outputs.size());
  } else {
    for (std::size_t i = 0; i < pass.outputs.size(); ++i) pass.outputs[i] += reply->outputs[i];
  }
  if (--pass.ranks_outstanding == 0) finish_pass();
}

void Scheduler::finish_pass() {
  const Pass pass = std::move(*pass_);
  pass_.reset();
  // One token of each is decoding, which says nothing of how fast a prefix is computed.
  if (!pass.error && pass.tokens >= kPrefillTokens * pass.batch.size()) {
    choice_.on_computed(pass.tokens, pass.begun, ipc::MonotonicClock::now());
  }
  if (pass.error) {
    ipc::log_debug("scheduler: a pass over {} requests: {}", pass.batch.size(),
                   pass.error->to_string());
    not_before_ = ipc::MonotonicClock::now() + kRefusedPause;
    loop_.after(kRefusedPause, [this, alive = alive_] {
      if (*alive) pump_later();
    });
  }
  for (std::size_t i = 0; i < pass.batch.size(); ++i) {
    Sequence& sequence = sequences_.at(pass.batch[i]);
    sequence.state = Sequence::State::kReady;
    if (sequence.fate == Sequence::Fate::kGoesOn) {
      if (!pass.error) {
        advance(sequence, pass.outputs[i]);
      } else if (is_passing(pass.error->code)) {
        sequence.fate = Sequence::Fate::kWaits;
      } else {
        refuse(sequence.asker, *pass.error);
        sequence.fate = Sequence::Fate::kEnds;
      }
    }
    settle(sequence.number);
  }
  pump_later();
}

void Scheduler::advance(Sequence& sequence, std::uint64_t output) {
  sequence.computed = sequence.planned;
  // What was computed in part with other weights than are in use belongs to nobody else.
  if (!sequence.mixed && cache_.publish(sequence)) store_new_blocks(sequence);
  if (sequence.computed < sequence.length()) return;
  cache_.trim(sequence);
  const std::uint32_t token = next_token(output);
  sequence.weights_last = weights_;
  sequence.inputs.push_back(model_input(sequence.inputs.back(), token));
  sequence.tokens.push_back(token);
  hash_full_blocks(sequence, config_.geometry.tokens_per_block);
  if (sequence.generated() < sequence.max_tokens) return;
  answer(sequence, ipc::GenerateEnd::kLength);
  sequence.fate = Sequence::Fate::kEnds;
}

void Scheduler::answer(const Sequence& sequence, ipc::GenerateEnd how) {
  ipc::GenerateReply reply;
  reply.end = how;
  reply.tokens.assign(sequence.tokens.begin() + sequence.prompt_tokens, sequence.tokens.end());
  if (sequence.generated() > 0) reply.weights_first = sequence.weights_first;
  reply.weights_last = sequence.weights_last;
  reply.cached_tokens = sequence.cached_tokens;
  reply.admissions = sequence.admissions;
  const Asker& asker = sequence.asker;
  if (const auto sent = server_->reply(asker.peer, asker.envelope, reply); !sent) {
    ipc::log_debug("scheduler: no answer delivered: {}", sent.error().to_string());
  }
}

void Scheduler::refuse(const Asker& asker, ipc::Error error) {
  ipc::log_info("scheduler: a request is refused: {}", error.to_string());
  if (const auto sent = server_->reply_error(asker.peer, asker.envelope, std::move(error)); !sent) {
    ipc::log_debug("scheduler: no refusal delivered: {}", sent.error().to_string());
  }
}

}  // namespace kvferry::worker
