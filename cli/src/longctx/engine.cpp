// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/engine.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using ipc::ErrorCode;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// A pass of ordinary size is one launch of recorded work; a larger one is as good, but no more of
/// a prefill is lost when something goes wrong.
constexpr std::uint32_t kPrefillWrites = 256;
/// A message holds several times as many.
constexpr std::size_t kReadsOfPass = 131'072;
constexpr ipc::Duration kJobRetry = 20ms;
constexpr ipc::Duration kKeptTime = 5s;

double seconds_between(ipc::TimePoint from, ipc::TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

/// A mover or the manager went away, or host memory is taken for a moment: the job is good later.
bool may_pass(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNoManager:
    case ErrorCode::kBusy:
    case ErrorCode::kTimeout:
    case ErrorCode::kPeerDied:
    case ErrorCode::kRevoked:
    case ErrorCode::kNotReady:
    case ErrorCode::kNoHostMemory:
    case ErrorCode::kStaleEpoch:  // an earlier manager's generation
    case ErrorCode::kCancelled: return true;
    default: return false;
  }
}

}  // namespace

double LongctxFigures::decode_s() const noexcept {
  double sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.waiting_s() + turn.computed_s;
  return sum;
}

double LongctxFigures::waiting_s() const noexcept {
  double sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.waiting_s();
  return sum;
}

std::uint64_t LongctxFigures::loaded_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.loaded_bytes + turn.streamed_bytes;
  return sum;
}

std::uint64_t LongctxFigures::streamed_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.streamed_bytes;
  return sum;
}

std::uint64_t LongctxFigures::stored_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const TurnRecord& turn : turns) sum += turn.stored_bytes;
  return sum;
}

LongctxEngine::LongctxEngine(BenchInstance& instance, const ipc::RuntimeDir& dir, Options options)
    : instance_(instance), options_(std::move(options)), scheduler_(options_.limits) {
  for (std::uint32_t rank = 0; rank < options_.geometry.ranks; ++rank) {
    channels_.push_back(std::make_unique<worker::StepChannel>(
        instance_.loop(), dir, options_.engine, ipc::Rank{rank}, "longctx",
        worker::StepChannel::Hooks{[] {}, [] {}}));
  }
  for (std::uint32_t number = 0; number < options_.sequences; ++number) {
    models_.emplace_back(options_.seed, number);
    loaded_.push_back(0);
  }
}

LongctxEngine::~LongctxEngine() { instance_.loop().cancel(retry_timer_); }

LongctxFigures LongctxEngine::run() {
  await("the workers' step channels", [this] {
    return std::all_of(channels_.begin(), channels_.end(),
                       [](const auto& channel) { return channel->is_up(); });
  });
  await("the cache", [this] {
    take_completions();
    const worker::CacheState& state = instance_.client().state();
    if (state.phase != worker::CachePhase::kReady || state.ranks.size() != channels_.size()) {
      return false;
    }
    contents_ = state.contents;
    arenas_ = state.ranks;
    return true;
  });
  first_manager_ = manager_ = instance_.client().stats().reconnects;
  started_at_ = turn_ended_at_ = ipc::MonotonicClock::now();
  options_.doing(
      fmt::format("{} contexts of {} tokens are computed", options_.sequences, options_.context));
  await("a sequence", [this] {
    if (!failed_ && scheduler_.sequences() == 0) let_in();
    pump();
    return failed_ || (scheduler_.sequences() == 0 && arrived_ == options_.sequences);
  });
  for (const SequenceModel& model : models_) figures_.checksums.push_back(model.checksum());
  drop_sequences();
  return std::move(figures_);
}

void LongctxEngine::await(std::string_view what, const std::function<bool()>& done) {
  const ipc::Status status = instance_.run_until(done, what);
  if (failed_) throw ipc::Exception(*failed_);
  if (status) return;
  ipc::Error error = status.error();
  if (error.code == ErrorCode::kTimeout && last_refusal_) {
    error.message += fmt::format("; the last copy that failed: {}", last_refusal_->to_string());
  }
  throw ipc::Exception(error);
}

void LongctxEngine::let_in() {
  const std::uint32_t many = options_.at_a_time.value_or(options_.sequences);
  for (std::uint32_t i = 0; i < many && arrived_ < options_.sequences; ++i) {
    if (const auto in = scheduler_.arrive(arrived_, options_.context, options_.steps); !in) {
      fail(in.error());
      return;
    }
    ++arrived_;
  }
}

void LongctxEngine::pump() {
  if (failed_) return;
  take_completions();
  note_manager();
  if (failed_ || !look_at_contents()) return;
  if (!turn_) begin_turn();
  if (stalled_since_) start_window();
  if (!failed_) submit_jobs();
}

bool LongctxEngine::look_at_contents() {
  const worker::CacheState& state = instance_.client().state();
  if (state.contents == contents_) return true;
  std::string what = "the cache was cleared or released";
  for (std::size_t rank = 0; rank < state.ranks.size(); ++rank) {
    const worker::ArenaId& now = state.ranks[rank];
    const worker::ArenaId& before = arenas_.at(rank);
    if (worker::same_contents(now, before)) continue;
    what =
        now.session != before.session
            ? fmt::format("the process that owned the memory of rank {} ended", rank)
            : fmt::format("the cache of rank {} was cleared or released: its epoch is {}, was {}",
                          rank, now.epoch.value, before.epoch.value);
    break;
  }
  fail(KVFERRY_ERROR(kStaleEpoch, "the device blocks are gone: {}", what));
  return false;
}

// After the completions, of which those that the earlier manager sent are therefore known.
void LongctxEngine::note_manager() {
  const std::uint64_t manager = instance_.client().stats().reconnects;
  if (std::exchange(manager_, manager) == manager) return;
  ipc::log_info("connected to a manager again; what the device has is stored again");
  scheduler_.doubt_host();
}

void LongctxEngine::take_completions() {
  instance_.take([this](const BenchTarget::Ended& ended) {
    const auto found = jobs_.find(ended.job);
    if (found == jobs_.end()) return;
    const TurnScheduler::Job job = std::move(found->second);
    jobs_.erase(found);
    if (job.way == TurnScheduler::Way::kLoad && --loads_ == 0) {
      figures_.loading_s += seconds_between(loads_since_, ipc::MonotonicClock::now());
    }
    on_job_ended(job, ended);
  });
}

void LongctxEngine::on_job_ended(const TurnScheduler::Job& job, const BenchTarget::Ended& ended) {
  scheduler_.job_ended(job.id, !ended.error);
  if (ended.error) {
    on_job_failed(job, *ended.error);
    return;
  }
  instance_.note_progress();
  if (job.way == TurnScheduler::Way::kLoad) {
    loaded_[job.sequence] += ended.bytes;
  } else {
    stored_ += ended.bytes;
  }
}

void LongctxEngine::on_job_failed(const TurnScheduler::Job& job, const ipc::Error& error) {
  const bool loads = job.way == TurnScheduler::Way::kLoad;
  if (!may_pass(error.code)) {
    fail(KVFERRY_ERROR(kNotFound, "sequence {} is lost: {} of its blocks could not be {}: {}{}",
                       job.sequence, job.places.size(), loads ? "loaded" : "stored",
                       error.to_string(), kept_over_managers()));
    return;
  }
  ++figures_.failed_jobs;
  ipc::log_info("a copy of sequence {} is tried again: {}", job.sequence, error.to_string());
  last_refusal_ = error;
  not_before_ = ipc::MonotonicClock::now() + kJobRetry;
  instance_.loop().cancel(retry_timer_);
  retry_timer_ = instance_.loop().at(not_before_, [] {});  // it ends a round of the loop
}

/// What is measured begins when nothing of the contexts is copied any more.
bool LongctxEngine::is_settled() {
  if (decoding_) return true;
  if (scheduler_.jobs() > 0 || ipc::MonotonicClock::now() < not_before_) return false;
  submit_jobs();
  return scheduler_.jobs() == 0;
}

void LongctxEngine::begin_turn() {
  const TurnScheduler::Turn next = scheduler_.next_turn();
  if (next.members.empty() || (!next.is_prefill && !is_settled())) return;
  turn_ = scheduler_.begin_turn();
  if (!turn_) return;
  turn_began_at_ = ipc::MonotonicClock::now();
  if (turn_->is_prefill) {
    if (decoding_) started_at_ = turn_began_at_;
  } else {
    note_turn();
  }
  decoding_ = !turn_->is_prefill;
  start_step();
}

void LongctxEngine::note_turn() {
  if (!decoding_) {
    figures_.prefill_s += seconds_between(started_at_, turn_began_at_);
    figures_.prefill_stored_bytes += std::exchange(stored_, 0);
    turn_ended_at_ = turn_began_at_;
    std::fill(loaded_.begin(), loaded_.end(), 0);
    figures_.loading_s = 0;
    options_.doing(fmt::format("{} sequences take turns", scheduler_.sequences()));
  }
  TurnRecord record;
  record.waited_s = seconds_between(turn_ended_at_, turn_began_at_);
  record.stored_bytes = std::exchange(stored_, 0);
  for (const TurnScheduler::Number number : turn_->members) {
    record.loaded_bytes += std::exchange(loaded_[number], 0);
  }
  figures_.turns.push_back(record);
}

void LongctxEngine::submit_jobs() {
  if (ipc::MonotonicClock::now() < not_before_ || !look_at_contents()) return;
  if (!instance_.accepts()) return;
  while (auto job = scheduler_.next_job()) {
    const ipc::Status sent = submit(*job);
    if (sent) continue;
    scheduler_.job_ended(job->id, false);
    on_job_failed(*job, sent.error());
    return;
  }
}

ipc::Status LongctxEngine::submit(const TurnScheduler::Job& job) {
  std::vector<worker::SequenceItem> items;
  items.reserve(job.places.size() * groups());
  for (std::uint32_t group = 0; group < groups(); ++group) {
    for (const TurnScheduler::Place& place : job.places) {
      items.push_back({ipc::GroupId{group}, ipc::BlockId{place.block}, place.index});
    }
  }
  KVFERRY_ASSIGN(const std::uint64_t id,
                 instance_.submit(options_.first_handle + job.sequence, items,
                                  job.way == TurnScheduler::Way::kStore));
  jobs_.emplace(id, job);
  if (job.way == TurnScheduler::Way::kLoad && loads_++ == 0) {
    loads_since_ = ipc::MonotonicClock::now();
  }
  return ipc::ok();
}

void LongctxEngine::start_step() {
  Step step;
  ipc::Decode pass;
  if (scheduler_.in_windows()) {
    const TurnScheduler::Number number = turn_->members.front();
    step.members = {number};
    step.tokens = {1};
    step.outputs = {0};
    step_ = std::move(step);
    start_window();
    return;
  }
  for (const TurnScheduler::Number number : turn_->members) {
    if (scheduler_.to_compute(number) == 0) continue;
    const auto place = static_cast<std::uint32_t>(step.members.size());
    step.members.push_back(number);
    step.tokens.push_back(turn_->is_prefill ? add_prefill(number, pass)
                                            : add_decode(number, place, pass));
    // A long context is a pass of its own.
    if (turn_->is_prefill) break;
  }
  step.outputs.assign(step.members.size(), 0);
  step_ = std::move(step);
  send_passes(std::move(pass));
}

void LongctxEngine::start_window() {
  const std::vector<std::uint32_t> window = scheduler_.begin_window();
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (window.empty()) {
    if (!stalled_since_) stalled_since_ = now;
    return;
  }
  if (stalled_since_) {
    figures_.turns.back().stalled_s += seconds_between(*stalled_since_, now);
    stalled_since_.reset();
  }
  ipc::Decode pass;
  const TurnScheduler::Number number = step_->members.front();
  if (!std::exchange(step_->has_token, true)) add_token(number, pass);
  for (const std::uint32_t index : window) add_read(number, index, 0, pass);
  send_passes(std::move(pass));
}

void LongctxEngine::send_passes(ipc::Decode pass) {
  pass.sequences = static_cast<std::uint32_t>(step_->members.size());
  const std::vector<ipc::DecodeRead> reads = std::exchange(pass.reads, {});
  std::size_t sent = 0;
  do {
    const std::size_t count = std::min(kReadsOfPass, reads.size() - sent);
    const auto from = reads.begin() + static_cast<std::ptrdiff_t>(sent);
    pass.reads.assign(from, from + static_cast<std::ptrdiff_t>(count));
    send(pass);
    pass.writes.clear();
    sent += count;
  } while (sent < reads.size());
}

/// Whole blocks, but for the last one. What a block holds depends on all tokens up to its last one.
std::uint32_t LongctxEngine::add_prefill(TurnScheduler::Number number, ipc::Decode& pass) {
  const std::uint32_t per_block = options_.geometry.tokens_per_block;
  const std::uint32_t blocks = std::max(1U, kPrefillWrites / groups());
  const std::uint32_t begin = scheduler_.tokens(number);
  const std::uint32_t end = begin + scheduler_.to_compute(number);
  std::uint32_t first = begin;
  for (std::uint32_t i = 0; i < blocks && first < end; ++i) {
    ipc::DecodeWrite write;
    write.first_token = first % per_block;
    write.tokens = std::min(per_block - write.first_token, end - first);
    write.block = ipc::BlockId{scheduler_.device_block(number, first / per_block)};
    for (std::uint32_t token = 0; token < write.tokens; ++token) {
      write.input = models_[number].read_context_token();
    }
    for (std::uint32_t group = 0; group < groups(); ++group) {
      write.group = ipc::GroupId{group};
      pass.writes.push_back(write);
    }
    first += write.tokens;
  }
  return first - begin;
}

/// One token, which attends to all before it and to itself.
std::uint32_t LongctxEngine::add_decode(TurnScheduler::Number number,
                                        std::uint32_t place,
                                        ipc::Decode& pass) {
  add_token(number, pass);
  const std::uint32_t last = scheduler_.tokens(number) / options_.geometry.tokens_per_block;
  for (std::uint32_t index = 0; index <= last; ++index) add_read(number, index, place, pass);
  return 1;
}

void LongctxEngine::add_token(TurnScheduler::Number number, ipc::Decode& pass) {
  const std::uint32_t per_block = options_.geometry.tokens_per_block;
  const std::uint32_t token = scheduler_.tokens(number);
  ipc::DecodeWrite write;
  write.block = ipc::BlockId{scheduler_.device_block(number, token / per_block)};
  write.first_token = token % per_block;
  write.input = models_[number].next_input();
  for (std::uint32_t group = 0; group < groups(); ++group) {
    write.group = ipc::GroupId{group};
    pass.writes.push_back(write);
  }
}

void LongctxEngine::add_read(TurnScheduler::Number number,
                             std::uint32_t index,
                             std::uint32_t place,
                             ipc::Decode& pass) const {
  const std::uint32_t per_block = options_.geometry.tokens_per_block;
  ipc::DecodeRead read;
  read.block = ipc::BlockId{scheduler_.device_block(number, index)};
  read.tokens = std::min(per_block, scheduler_.tokens(number) + 1 - index * per_block);
  read.sequence = place;
  read.position = index;
  for (std::uint32_t group = 0; group < groups(); ++group) {
    read.group = ipc::GroupId{group};
    pass.reads.push_back(read);
  }
}

// Of the memory that the block tables are of: a worker that has another one by now refuses it, and
// a manager that has just come names none.
void LongctxEngine::send(ipc::Decode pass) {
  for (std::uint32_t rank = 0; rank < channels_.size() && !failed_; ++rank) {
    pass.session = arenas_.at(rank).session;
    pass.epoch = arenas_.at(rank).epoch;
    const ipc::Status sent = channels_[rank]->send(
        pass, [this](const ipc::Result<ipc::DecodeReply>& reply) { on_reply(reply); });
    if (sent) {
      ++step_->outstanding;
    } else {
      fail(sent.error());
    }
  }
}

void LongctxEngine::on_reply(const ipc::Result<ipc::DecodeReply>& reply) {
  if (failed_ || !step_) return;
  if (!reply) {
    fail(reply.error());
    return;
  }
  if (reply->outputs.size() != step_->outputs.size()) {
    fail(KVFERRY_ERROR(kProtocol, "a rank computed {} outputs, asked for {}", reply->outputs.size(),
                       step_->outputs.size()));
    return;
  }
  instance_.note_progress();
  for (std::size_t i = 0; i < step_->outputs.size(); ++i) step_->outputs[i] += reply->outputs[i];
  if (--step_->outstanding == 0) finish_passes();
}

void LongctxEngine::finish_passes() {
  if (scheduler_.in_windows()) {
    scheduler_.end_window();
    if (!scheduler_.is_read()) {
      submit_jobs();  // what was read makes room: before the next pass, so that they overlap
      if (!failed_) start_window();
      return;
    }
  }
  finish_step();
}

void LongctxEngine::finish_step() {
  const Step step = *std::exchange(step_, std::nullopt);
  for (std::size_t i = 0; i < step.members.size(); ++i) {
    // Not sooner: what is computed may be stored.
    scheduler_.computed(step.members[i], step.tokens[i]);
    if (!turn_->is_prefill) models_[step.members[i]].take_output(step.outputs[i]);
  }
  if (!turn_->is_prefill) figures_.tokens += step.members.size();
  const bool goes_on = std::any_of(
      turn_->members.begin(), turn_->members.end(),
      [this](TurnScheduler::Number number) { return scheduler_.to_compute(number) > 0; });
  if (goes_on) {
    start_step();
    return;
  }
  finish_turn();
}

void LongctxEngine::finish_turn() {
  turn_ended_at_ = ipc::MonotonicClock::now();
  if (!turn_->is_prefill) {
    TurnRecord& record = figures_.turns.back();
    record.computed_s = seconds_between(turn_began_at_, turn_ended_at_) - record.stalled_s;
    for (const TurnScheduler::Number number : turn_->members) {
      record.streamed_bytes += std::exchange(loaded_[number], 0);
    }
  }
  scheduler_.end_turn();
  turn_.reset();
  // What comes next is decided in pump(), when completions that are here were taken.
}

void LongctxEngine::fail(ipc::Error error) {
  if (!failed_) failed_ = std::move(error);
}

std::string LongctxEngine::kept_over_managers() {
  const std::uint64_t lost = instance_.client().stats().reconnects - first_manager_;
  if (lost == 0) return {};
  std::string so_far = fmt::format("; the manager was lost {} times", lost);
  const auto text = instance_.client().status(ipc::Deadline::after(kKeptTime));
  const auto status =
      text ? nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false) : nlohmann::json();
  if (!status.is_object() || !status.contains("pool")) return so_far;
  const nlohmann::json kept = status["pool"].value("kept", nlohmann::json());
  if (!kept.is_object()) return so_far + ", and this one has taken over no pool";
  return so_far + fmt::format(
                      ", and of what it had this one found {} blocks of sequences: those "
                      "that had their checksums by then",
                      kept.value("sequence_blocks", std::uint64_t{0}));
}

void LongctxEngine::drop_sequences() {
  std::uint32_t number = 0;
  await("a manager that drops what was swapped out", [&] {
    take_completions();
    while (number < options_.sequences) {
      const ipc::Status dropped = instance_.drop(options_.first_handle + number);
      // One that was on the device all the time was never swapped out.
      if (!dropped && dropped.error().code != ErrorCode::kNotFound) {
        if (!may_pass(dropped.error().code)) fail(dropped.error());
        last_refusal_ = dropped.error();
        return failed_.has_value();
      }
      ++number;
    }
    return true;
  });
}

}  // namespace kvferry::cli
