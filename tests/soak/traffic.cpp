// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/traffic.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace kvferry::soak {
namespace {

using ipc::ErrorCode;
using ipc::Status;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::GroupId kMain{0};
constexpr std::size_t kBlocks = 6;  ///< A round moves so many, out and in.
constexpr std::size_t kMaxTold = 20;
/// Every job is answered: no deadline of the handshake adds up to as much.
constexpr ipc::Duration kAnswerTime = 60s;
constexpr ipc::Duration kRequestTime = 10s;
constexpr ipc::Duration kLookAgain = 2ms;

/// A clear, a re-init or a death came between.
bool is_passing(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNoManager:
    case ErrorCode::kStaleEpoch:
    case ErrorCode::kNotReady:
    case ErrorCode::kRevoked:
    case ErrorCode::kPeerDied:
    case ErrorCode::kBusy: return true;
    default: return false;
  }
}

ErrorCode code_of(const worker::Completion& done) {
  for (const std::uint8_t result : done.results) {
    if (result != 0) return static_cast<ErrorCode>(result);
  }
  return ErrorCode::kInvalidArgument;
}

std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 31U)) * 0x9E3779B97F4A7C15ULL;
  return value ^ (value >> 29U);
}

}  // namespace

Traffic::Traffic(TrafficOptions options) : options_(std::move(options)), random_(options_.seed) {
  auto client = worker::Client::connect(options_.client, ipc::Deadline::after(kAnswerTime));
  if (!client) throw ipc::Exception(std::move(client).error());
  client_ = std::move(*client);
  if (const Status ready = client_->wait_ready(true, ipc::Deadline::after(kAnswerTime)); !ready) {
    throw ipc::Exception(ready.error());
  }
  device_blocks_ = client_->state().group_blocks.at(kMain.value);
  auto dir = ipc::RuntimeDir::open(options_.client.runtime_dir, options_.client.instance);
  if (!dir) throw ipc::Exception(std::move(dir).error());
  thread_ = std::thread([this, dir = *dir] {
    for (std::uint32_t rank = 0; rank < options_.client.ranks; ++rank) {
      channels_.push_back(std::make_unique<worker::StepChannel>(
          loop_, dir, options_.client.engine, ipc::Rank{rank},
          fmt::format("soak {}", options_.client.engine),
          worker::StepChannel::Hooks{.on_up = [] {}, .on_lost = [] {}}));
    }
    run();
    channels_.clear();
    client_->close();
  });
}

Traffic::~Traffic() { stop(); }

void Traffic::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

TrafficCounts Traffic::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

bool Traffic::wait_round(ipc::Deadline deadline) {
  std::unique_lock lock(mutex_);
  const std::uint64_t after = begun_;
  return changed_.wait_until(lock, deadline.when(), [&] { return completed_ > after; });
}

bool Traffic::pause(ipc::Deadline deadline) {
  std::unique_lock lock(mutex_);
  pause_wanted_ = true;
  return changed_.wait_until(lock, deadline.when(), [this] { return paused_; });
}

void Traffic::go_on() {
  const std::lock_guard lock(mutex_);
  pause_wanted_ = false;
  changed_.notify_all();
}

void Traffic::tell_wrong(std::string what) {
  const std::lock_guard lock(mutex_);
  if (counts_.wrong.size() < kMaxTold) counts_.wrong.push_back(std::move(what));
}

void Traffic::run() {
  for (;;) {
    std::uint64_t number = 0;
    {
      std::unique_lock lock(mutex_);
      if (pause_wanted_) {
        paused_ = true;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !pause_wanted_ || stop_; });
        paused_ = false;
      }
      if (stop_) return;
      number = ++begun_;
    }
    const Status done = round();
    if (!done && !is_passing(done.error().code)) tell_wrong(done.error().to_string());
    const std::lock_guard lock(mutex_);
    if (done) {
      ++counts_.rounds;
      completed_ = number;
      changed_.notify_all();
    } else {
      ++counts_.interrupted;
      ipc::log_debug("round {}: {}", number, done.error().to_string());
    }
  }
}

Status Traffic::round() {
  // News and step channels, also while nothing can be moved.
  (void)client_->poll(1);
  loop_.run_once(ipc::Deadline::after({}));
  const bool all_up = std::all_of(channels_.begin(), channels_.end(),
                                  [](const auto& channel) { return channel->is_up(); });
  const worker::CacheState& state = client_->state();
  if (!all_up || state.phase != worker::CachePhase::kReady || !state.offload_ready) {
    loop_.run_once(ipc::Deadline::after(kLookAgain));
    return KVFERRY_ERROR(kNotReady, "no block can be moved now");
  }
  generation_ = state.generation;
  arenas_ = state.ranks;
  const std::vector<ipc::BlockId> blocks = pick_blocks(2 * kBlocks);
  const std::span<const ipc::BlockId> sources(blocks.data(), kBlocks);
  const std::span<const ipc::BlockId> targets(blocks.data() + kBlocks, kBlocks);
  // First, so that rounds that are cut short do not add up.
  while (stored_.size() >= kMaxStored) {
    const auto oldest = stored_.begin();
    const bool sequence = oldest->second.keys.empty();
    const std::uint64_t gone = oldest->first;
    stored_.erase(oldest);
    if (sequence) KVFERRY_TRY(drop(gone));
  }
  const std::uint64_t name = next_name_++;
  KVFERRY_TRY(store(name, sources));
  // Often what was just stored; else whatever is there, from before a clear as well.
  auto chosen = stored_.find(name);
  if (random_() % 3 != 0) {
    chosen = std::next(stored_.begin(), static_cast<std::ptrdiff_t>(random_() % stored_.size()));
  }
  KVFERRY_TRY(load(chosen->first, targets));
  return ipc::ok();
}

std::vector<ipc::BlockId> Traffic::pick_blocks(std::size_t count) {
  std::vector<std::uint32_t> all(device_blocks_);
  std::iota(all.begin(), all.end(), 0U);
  std::vector<ipc::BlockId> picked;
  for (std::size_t i = 0; i < count; ++i) {
    std::swap(all[i], all[i + random_() % (all.size() - i)]);
    picked.push_back(ipc::BlockId{all[i]});
  }
  return picked;
}

Status Traffic::store(std::uint64_t name, std::span<const ipc::BlockId> blocks) {
  const bool as_sequence = random_() % 2 == 0;
  Stored stored;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    stored.seeds.push_back(mix(options_.seed + name * 1000 + i));
    if (!as_sequence) {
      const std::uint64_t text = stored.seeds.back();
      stored.keys.push_back(ipc::Digest::hash(&text, sizeof(text)));
    }
  }
  KVFERRY_TRY(run_step(blocks, stored.seeds, false));
  KVFERRY_TRY(check_generation());
  stored.generation = generation_;
  stored.reconnects = client_->stats().reconnects;
  ipc::JobId job;
  if (as_sequence) {
    std::vector<worker::SequenceItem> items;
    for (std::uint32_t i = 0; i < blocks.size(); ++i) items.push_back({kMain, blocks[i], i});
    KVFERRY_ASSIGN(job, client_->swap_out(name, items));
  } else {
    std::vector<worker::StoreTarget> targets;
    for (const ipc::Digest& key : stored.keys) targets.push_back({kMain, key});
    KVFERRY_ASSIGN(const auto slots,
                   client_->reserve_store(targets, ipc::Deadline::after(kRequestTime)));
    std::vector<worker::StoreItem> items;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i].outcome == worker::Reservation::kReserved) {
        items.push_back({kMain, blocks[i], slots[i].slot});
      }
    }
    if (items.size() != blocks.size()) {
      std::vector<std::uint64_t> reserved;
      for (const worker::StoreItem& item : items) reserved.push_back(item.slot);
      KVFERRY_TRY(client_->abandon_store(reserved));
      return KVFERRY_ERROR(kNoHostMemory, "{} of {} new blocks got a slot", items.size(),
                           blocks.size());
    }
    const auto submitted = client_->submit_store(items);
    if (!submitted) {
      std::vector<std::uint64_t> reserved;
      for (const worker::StoreItem& item : items) reserved.push_back(item.slot);
      (void)client_->abandon_store(reserved);
      return submitted.error();
    }
    job = *submitted;
  }
  KVFERRY_ASSIGN(const worker::Completion done, finish(job));
  if (!done.all_ok()) {
    // What of it was swapped out stays until it is dropped.
    if (as_sequence) KVFERRY_TRY(drop(name));
    return ipc::Error{code_of(done), fmt::format("store {}: {}", name, done.message)};
  }
  {
    const std::lock_guard lock(mutex_);
    counts_.blocks_out += blocks.size();
  }
  stored_.emplace(name, std::move(stored));
  return ipc::ok();
}

// Until it is told: a sequence that nobody drops takes host memory for ever.
Status Traffic::drop(std::uint64_t name) {
  to_drop_.push_back(name);
  while (!to_drop_.empty()) {
    const Status dropped =
        client_->drop_sequence(to_drop_.back(), ipc::Deadline::after(kRequestTime));
    if (!dropped && dropped.error().code != ErrorCode::kNotFound) return dropped.error();
    to_drop_.pop_back();
  }
  return ipc::ok();
}

Status Traffic::load(std::uint64_t name, std::span<const ipc::BlockId> blocks) {
  const Stored& stored = stored_.at(name);
  KVFERRY_TRY(check_generation());
  ipc::JobId job;
  if (stored.keys.empty()) {
    std::vector<worker::SequenceItem> items;
    for (std::uint32_t i = 0; i < blocks.size(); ++i) items.push_back({kMain, blocks[i], i});
    KVFERRY_ASSIGN(job, client_->swap_in(name, items));
  } else {
    std::vector<worker::LoadItem> items;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      items.push_back({kMain, blocks[i], stored.keys[i]});
    }
    KVFERRY_ASSIGN(job, client_->submit_load(items, 1));
  }
  KVFERRY_ASSIGN(const worker::Completion done, finish(job));
  if (!done.all_ok()) {
    const ErrorCode code = code_of(done);
    if (code != ErrorCode::kNotFound) {
      return ipc::Error{code, fmt::format("load {}: {}", name, done.message)};
    }
    // Gone with its manager: as promised. Host memory has room for all that we keep.
    const bool same_manager = stored.reconnects == client_->stats().reconnects;
    stored_.erase(name);
    if (!same_manager) return KVFERRY_ERROR(kPeerDied, "went with its manager");
    const std::lock_guard lock(mutex_);
    counts_.blocks_lost += blocks.size();
    return KVFERRY_ERROR(kNotFound, "{} was stored and is lost: {}", name, done.message);
  }
  std::vector<std::uint64_t> seeds = stored.seeds;
  if (std::exchange(options_.corrupt_one, false)) ++seeds.front();
  KVFERRY_TRY(run_step(blocks, seeds, true));
  const std::lock_guard lock(mutex_);
  counts_.blocks_in += blocks.size();
  counts_.blocks_verified += blocks.size();
  if (generation_ != stored.generation) counts_.over_clears += blocks.size();
  return ipc::ok();
}

// Looking at the state acknowledges what it says, and blocks of another generation hold nothing: so
// it is looked at only to find the same one as at the beginning of the round.
Status Traffic::check_generation() {
  const std::uint64_t now = client_->state().generation;
  if (now == generation_) return ipc::ok();
  return KVFERRY_ERROR(kStaleEpoch, "generation {} has ended, {} is there", generation_, now);
}

ipc::Result<worker::Completion> Traffic::finish(ipc::JobId job) {
  const std::array<ipc::JobId, 1> jobs = {job};
  auto done = client_->wait(jobs, ipc::Deadline::after(kAnswerTime));
  if (!done) {
    return KVFERRY_ERROR(kTimeout, "job {} was never answered: {}", job.value,
                         done.error().to_string());
  }
  return std::move(done->front());
}

Status Traffic::run_step(std::span<const ipc::BlockId> blocks,
                         std::span<const std::uint64_t> seeds,
                         bool verify) {
  ipc::Step step;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    (verify ? step.verifies : step.fills).push_back(ipc::SeededItem{kMain, blocks[i], seeds[i]});
  }
  std::size_t outstanding = 0;
  Status failed;
  std::uint64_t corrupt = 0;
  const auto on_reply = [&](ipc::Result<ipc::StepReply> reply) {
    --outstanding;
    if (!reply) {
      failed = reply.error();
      return;
    }
    for (std::size_t i = 0; i < reply->mismatches.size(); ++i) {
      if (reply->mismatches[i] == 0) continue;
      ++corrupt;
      tell_wrong(fmt::format("CORRUPT: device block {}: {} words differ", blocks[i].value,
                             reply->mismatches[i]));
    }
  };
  for (std::size_t rank = 0; rank < channels_.size(); ++rank) {
    step.session = arenas_.at(rank).session;
    step.epoch = arenas_.at(rank).epoch;
    if (Status sent = channels_[rank]->send(step, on_reply); !sent) {
      failed = std::move(sent);
    } else {
      ++outstanding;
    }
  }
  // Answered, or its worker is dead: a living one answers, or its clear ends it.
  while (outstanding > 0) loop_.run_once(ipc::Deadline::after(1s));
  if (corrupt > 0) {
    const std::lock_guard lock(mutex_);
    counts_.blocks_corrupt += corrupt;
  }
  return failed;
}

}  // namespace kvferry::soak
