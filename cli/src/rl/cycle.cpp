// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/cycle.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// The manager gives ranks some time beyond the deadline (ending a mover, proving that its memory
/// is back, a commit) and answers then at the latest.
constexpr ipc::Duration kAnswerMargin = 15s;
constexpr ipc::Duration kCommitMargin = 15s;
/// Copies that ran when the engine was paused may still end: a refusal as not idle is for now.
constexpr ipc::Duration kTransfersEnd = 10s;
constexpr ipc::Duration kRefusedAgain = 20ms;

}  // namespace

Cycle::Cycle(ipc::EventLoop& loop, OperatorCalls& calls, MemoryWatch& memory, Options options)
    : loop_(loop), calls_(calls), sender_(calls), memory_(memory), options_(std::move(options)) {}

Cycle::~Cycle() { loop_.cancel(timer_); }

double Cycle::ms_since_asked() const {
  return std::chrono::duration<double, std::milli>(ipc::MonotonicClock::now() - asked_at_).count();
}

template <typename Reply, typename Request, typename Then>
void Cycle::ask(ipc::MessageKind kind,
                std::string_view step,
                const Request& request,
                ipc::Duration more,
                Then then) {
  step_ = step;
  asked_at_ = ipc::MonotonicClock::now();
  const auto answered = [this, then = std::move(then)](const ipc::Result<ipc::Envelope>& answer) {
    if (!answer) return fail(answer.error());
    if (answer->error) return fail(*answer->error);
    auto reply = ipc::decode<Reply>(answer->body, "reply");
    if (!reply) return fail(reply.error());
    then(*reply);
  };
  const auto sent = calls_.ask(kind, ipc::encode(request), request.deadline + more, answered);
  if (!sent) fail(sent.error());
}

void Cycle::start(const WeightsVersion& weights, IterationRecord& record, Done done) {
  weights_ = &weights;
  record_ = &record;
  done_ = std::move(done);
  pause_engine();
}

void Cycle::pause_engine() {
  ipc::PauseRequest request;
  request.engine = options_.engine;
  request.mode = options_.mode;
  ask<ipc::PauseReply>(
      ipc::MessageKind::kPause, "pause", request, kAnswerMargin,
      [this](const ipc::PauseReply& reply) {
        record_->pause_ms = ms_since_asked();
        if (reply.schedulers == 0) {
          return fail(KVFERRY_ERROR(
              kNotReady, "no scheduler of engine {} is connected to the manager", options_.engine));
        }
        idle_by_ = ipc::MonotonicClock::now() + kTransfersEnd;
        step_ = "release";
        asked_at_ = ipc::MonotonicClock::now();
        release_memory();
      });
}

void Cycle::release_memory() {
  if (!options_.release) return update_weights();
  ipc::ReleaseRequest request;
  request.engine = options_.engine;
  request.host = ipc::HostPolicy::kKeep;
  const auto answered = [this](const ipc::Result<ipc::Envelope>& answer) {
    if (!answer) return fail(answer.error());
    if (answer->error) return on_refused(*answer->error, &Cycle::release_memory);
    const auto reply = ipc::decode<ipc::ReleaseReply>(answer->body, "ReleaseReply");
    if (!reply) return fail(reply.error());
    record_->release_ms = ms_since_asked();
    std::uint64_t least = UINT64_MAX;
    for (const ipc::RankOutcome& rank : reply->cleared) {
      if (rank.outcome.kind == ipc::ClearKind::kQuarantined) ++quarantined_;
      least = std::min(least, rank.outcome.free_after);
    }
    record_->free_while_released = reply->cleared.empty() ? 0 : least;
    resume_memory();
  };
  const auto sent = calls_.ask(ipc::MessageKind::kReleaseMemory, ipc::encode(request),
                               request.deadline + kAnswerMargin, answered);
  if (!sent) fail(sent.error());
}

// As if the trainer had used the device meanwhile.
void Cycle::resume_memory() {
  ipc::ResumeRequest request;
  request.engine = options_.engine;
  ask<ipc::ResumeReply>(ipc::MessageKind::kResumeMemory, "resume", request, kAnswerMargin,
                        [this](const ipc::ResumeReply& /*reply*/) {
                          record_->resume_ms = ms_since_asked();
                          update_weights();
                        });
}

void Cycle::update_weights() {
  step_ = "update of the weights";
  asked_at_ = ipc::MonotonicClock::now();
  switch (options_.update) {
    case UpdateKind::kNone: return clear_cache();
    case UpdateKind::kDisk:
      source_ = {ipc::WeightsFrom::kDisk, weights_->file.string()};
      return ask_for_update();
    case UpdateKind::kDistributed:
      source_ = {ipc::WeightsFrom::kDistributed, weights_->file.string()};
      return ask_for_update();
    case UpdateKind::kIpc:
      source_ = {ipc::WeightsFrom::kIpc, weights_->lender};
      return ask_for_update();
    case UpdateKind::kTensor:
      return sender_.send(weights_->file, options_.engine,
                          [this](const ipc::Result<ipc::WeightsSource>& sent) {
                            if (!sent) return fail(sent.error());
                            source_ = *sent;
                            ask_for_update();
                          });
  }
}

void Cycle::ask_for_update() {
  ipc::UpdateWeightsRequest request;
  request.engine = options_.engine;
  request.source = source_;
  // Frozen requests hold blocks: with a flush the engine would not be idle.
  request.flush_cache = options_.mode != ipc::PauseMode::kInPlace;
  request.weights = weights_->id;
  const auto answered = [this](const ipc::Result<ipc::Envelope>& answer) {
    if (!answer) return fail(answer.error());
    if (answer->error) return on_refused(*answer->error, &Cycle::ask_for_update);
    const auto reply = ipc::decode<ipc::UpdateWeightsReply>(answer->body, "UpdateWeightsReply");
    if (!reply) return fail(reply.error());
    on_updated(*reply);
  };
  const auto sent = calls_.ask(ipc::MessageKind::kUpdateWeights, ipc::encode(request),
                               request.deadline + kCommitMargin + kAnswerMargin, answered);
  if (!sent) fail(sent.error());
}

void Cycle::on_refused(const ipc::Error& why, void (Cycle::*again)()) {
  const bool for_now = why.code == ipc::ErrorCode::kNotIdle || why.code == ipc::ErrorCode::kBusy;
  if (!for_now || ipc::MonotonicClock::now() >= idle_by_) return fail(why);
  timer_ = loop_.after(kRefusedAgain, [this, again] { (this->*again)(); });
}

void Cycle::on_updated(const ipc::UpdateWeightsReply& reply) {
  record_->update_ms = ms_since_asked();
  transport_ = reply.transport;
  if (reply.weights != weights_->id) {
    return fail(KVFERRY_ERROR(kProtocol,
                              "the engine computes with weights {} after an update to {}",
                              reply.weights.hex(), weights_->id.hex()));
  }
  clear_cache();
}

void Cycle::clear_cache() {
  if (!options_.clear) return look_before();
  ipc::ClearRequest request;
  request.engine = options_.engine;
  request.host = ipc::HostPolicy::kKeep;
  step_ = "clear";
  asked_at_ = ipc::MonotonicClock::now();
  const auto sent =
      calls_.ask(ipc::MessageKind::kClear, ipc::encode(request), request.deadline + kAnswerMargin,
                 [this](const ipc::Result<ipc::Envelope>& answer) { on_cleared(answer); });
  if (!sent) fail(sent.error());
}

// Memory that waits for a peer is no failure of the clear: it is done, and says so.
void Cycle::on_cleared(const ipc::Result<ipc::Envelope>& answer) {
  if (!answer) return fail(answer.error());
  bool held = answer->error && answer->error->code == ipc::ErrorCode::kQuarantined;
  if (answer->error && !held) return fail(*answer->error);
  const auto reply = ipc::decode<ipc::ClearReply>(answer->body, "ClearReply");
  if (!reply && !held) return fail(reply.error());
  if (reply) {
    for (const ipc::RankOutcome& rank : reply->ranks) {
      held = held || rank.outcome.kind == ipc::ClearKind::kQuarantined;
    }
  }
  if (held) ++quarantined_;
  record_->clear_ms = ms_since_asked();
  reinit_cache();
}

void Cycle::reinit_cache() {
  ipc::ReinitRequest request;
  request.engine = options_.engine;
  ask<ipc::ReinitReply>(ipc::MessageKind::kReinit, "re-init", request, kAnswerMargin,
                        [this](const ipc::ReinitReply& /*reply*/) {
                          record_->reinit_ms = ms_since_asked();
                          look_before();
                        });
}

void Cycle::look_before() {
  step_ = "look at the workers' memory while paused";
  memory_.look([this](ipc::Result<std::vector<ipc::WorkerMemory>> seen) {
    if (!seen) return fail(seen.error());
    record_->ranks.clear();
    for (const ipc::WorkerMemory& worker : *seen) {
      RankReserve rank;
      rank.reserved_before = worker.reserved;
      rank.used_before = worker.used;
      record_->ranks.push_back(rank);
    }
    continue_engine();
  });
}

void Cycle::continue_engine() {
  ipc::ContinueRequest request;
  request.engine = options_.engine;
  request.empty_cache = options_.empty_cache;
  ask<ipc::ContinueReply>(ipc::MessageKind::kContinue, "continue", request, kAnswerMargin,
                          [this](const ipc::ContinueReply& reply) { on_continued(reply); });
}

// What a rank kept is told by the answer: as soon as requests run again they take memory anew.
void Cycle::on_continued(const ipc::ContinueReply& reply) {
  record_->continue_ms = ms_since_asked();
  if (!options_.empty_cache) return look_after();
  if (reply.ranks.size() != record_->ranks.size()) {
    return fail(KVFERRY_ERROR(kProtocol, "{} of {} ranks were emptied", reply.ranks.size(),
                              record_->ranks.size()));
  }
  for (const ipc::RankMemory& emptied : reply.ranks) {
    if (emptied.error) return fail(*emptied.error);
    if (emptied.absent || emptied.rank.value >= record_->ranks.size()) {
      return fail(KVFERRY_ERROR(kPeerDied, "rank {} has no worker", emptied.rank.value));
    }
    RankReserve& rank = record_->ranks[emptied.rank.value];
    rank.reserved_after = emptied.memory.reserved_after;
    rank.used_after = emptied.memory.used_after;
    rank.free_on_device = emptied.memory.free_on_device;
  }
  ++emptied_continues_;
  look_after();
}

void Cycle::look_after() {
  step_ = "look at the workers' memory after the continue";
  memory_.look([this](ipc::Result<std::vector<ipc::WorkerMemory>> seen) {
    if (!seen) return fail(seen.error());
    workers_ = std::move(*seen);
    for (std::size_t i = 0; i < workers_.size() && !options_.empty_cache; ++i) {
      record_->ranks[i].reserved_after = workers_[i].reserved;
      record_->ranks[i].used_after = workers_[i].used;
      record_->ranks[i].free_on_device = workers_[i].free_on_device;
    }
    finish(ipc::ok());
  });
}

void Cycle::fail(const ipc::Error& why) {
  ipc::Error named = why;
  named.message = std::string(step_) + ": " + why.message;
  finish(named);
}

void Cycle::finish(const ipc::Status& status) {
  step_ = "nothing";
  std::exchange(done_, nullptr)(status);
}

}  // namespace kvferry::cli
