// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/turn_scheduler.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvferry::cli {

using ipc::Status;

TurnScheduler::TurnScheduler(const Limits& limits) : limits_(limits) {
  KVFERRY_CHECK(limits_.tokens_per_block > 0 && limits_.slice > 0 && limits_.job_blocks > 0 &&
                    limits_.jobs_each_way > 0 && limits_.active_sequences > 0 &&
                    limits_.window_blocks > 0,
                "a scheduler without room for anything");
  KVFERRY_CHECK(limits_.active_blocks <= limits_.device_blocks, "a turn of more than the device");
  for (std::uint32_t block = 0; block < limits_.device_blocks; ++block) {
    free_.insert(free_.end(), block);
  }
}

std::uint32_t TurnScheduler::blocks_of(std::uint32_t tokens,
                                       std::uint32_t tokens_per_block) noexcept {
  return tokens / tokens_per_block + (tokens % tokens_per_block == 0 ? 0 : 1);
}

Status TurnScheduler::arrive(Number number, std::uint32_t context, std::uint32_t steps) {
  KVFERRY_CHECK(!sequences_.contains(number), "a sequence arrived twice");
  const std::uint32_t most_tokens = context + steps;
  const std::uint32_t most = blocks_of(most_tokens);
  if (context == 0 || most_tokens < context) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "sequence {} has a context of {} tokens and computes {} more: give it a "
                         "token at least, and at most {} in all",
                         number, context, steps, std::numeric_limits<std::uint32_t>::max());
  }
  if (most > limits_.device_blocks && limits_.device_blocks < kLeastForWindows) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "sequence {} grows to {} blocks, the device has {}: give it all of them, "
                         "or {} at least, to compute in windows",
                         number, most, limits_.device_blocks, kLeastForWindows);
  }
  const std::uint64_t host = host_blocks_of(most);
  if (host > limits_.host_blocks - host_reserved_) {
    return KVFERRY_ERROR(kNoHostMemory,
                         "sequence {} needs {} blocks of host memory, {} of {} are left: let fewer "
                         "sequences in, or give more host memory",
                         number, host, limits_.host_blocks - host_reserved_, limits_.host_blocks);
  }
  host_reserved_ += host;
  most_blocks_ += most;
  Sequence& sequence = sequences_[number];
  sequence.context = context;
  sequence.most_tokens = most_tokens;
  sequence.blocks.resize(most);
  arrivals_.push_back(number);
  return ipc::ok();
}

void TurnScheduler::leave(Number number) {
  KVFERRY_CHECK(!sequences_.at(number).in_turn, "a sequence left in its turn");
  std::erase(arrivals_, number);
  std::erase(ready_, number);
  finish(number);
}

std::uint32_t TurnScheduler::turn_end(const Sequence& sequence) const noexcept {
  if (sequence.in_turn) return sequence.turn_end;
  const std::uint32_t end =
      sequence.tokens < sequence.context
          ? sequence.context
          : sequence.tokens + std::min(limits_.slice, sequence.most_tokens - sequence.tokens);
  if (blocks_of(end) <= limits_.device_blocks) return end;
  // What it writes stays for the turn: no more than leaves as much to read the others in.
  const std::uint64_t writes = std::max(1U, limits_.device_blocks / 2);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(end, (first_written(sequence) + writes) * limits_.tokens_per_block));
}

std::uint32_t TurnScheduler::to_compute(Number number) const {
  const Sequence& sequence = sequences_.at(number);
  return turn_end(sequence) - sequence.tokens;
}

std::vector<TurnScheduler::Number> TurnScheduler::order() const {
  std::vector<Number> order(arrivals_.begin(), arrivals_.end());
  order.insert(order.end(), ready_.begin(), ready_.end());
  return order;
}

TurnScheduler::Turn TurnScheduler::next_turn() const {
  Turn turn;
  turn.is_prefill = !arrivals_.empty();
  std::uint64_t blocks = 0;
  for (const Number number : turn.is_prefill ? arrivals_ : ready_) {
    blocks += turn_blocks(sequences_.at(number));
    const bool fits =
        blocks <= limits_.active_blocks && turn.members.size() < limits_.active_sequences;
    if (!fits && !turn.members.empty()) break;
    turn.members.push_back(number);
  }
  return turn;
}

bool TurnScheduler::is_complete(const Sequence& sequence) const {
  const std::uint32_t blocks = turn_blocks(sequence);
  for (std::uint32_t i = std::max(sequence.marks.not_here, first_needed(sequence)); i < blocks;
       ++i) {
    if (sequence.blocks[i].where != Where::kHere) return false;
  }
  // The first block that it writes is the only one with contents: a store may still read it.
  const std::uint32_t written = first_written(sequence);
  return written >= blocks || !sequence.blocks[written].storing;
}

std::optional<TurnScheduler::Turn> TurnScheduler::begin_turn() {
  KVFERRY_CHECK(!turn_, "a turn begins within a turn");
  give_blocks();
  Turn turn = next_turn();
  for (const Number number : turn.members) {
    if (!is_complete(sequences_.at(number))) return std::nullopt;
  }
  if (turn.members.empty()) return std::nullopt;
  auto& queue = turn.is_prefill ? arrivals_ : ready_;
  for (const Number number : turn.members) {
    KVFERRY_CHECK(queue.front() == number, "a turn is not the front of the order");
    queue.pop_front();
    Sequence& sequence = sequences_.at(number);
    sequence.turn_end = turn_end(sequence);
    sequence.in_turn = true;
  }
  turn_ = turn;
  if (!turn.is_prefill && needs_windows(sequences_.at(turn.members.front()))) {
    begin_windows(turn.members.front());
  }
  return turn;
}

void TurnScheduler::computed(Number number, std::uint32_t tokens) {
  Sequence& sequence = sequences_.at(number);
  KVFERRY_CHECK(sequence.in_turn && tokens > 0 && tokens <= to_compute(number),
                "a sequence computed what it was not to compute");
  KVFERRY_CHECK(!windows_ || (tokens == 1 && is_read()), "a token was computed of a part");
  const std::uint32_t first = first_written(sequence);
  sequence.tokens += tokens;
  for (std::uint32_t i = first; i < blocks_of(sequence.tokens); ++i) {
    Block& block = sequence.blocks[i];
    KVFERRY_CHECK(block.where == Where::kHere && !block.storing, "a block was written elsewhere");
    block.on_host = false;
  }
  sequence.marks.unstored = std::min(sequence.marks.unstored, first);
  if (windows_) begin_token();
}

void TurnScheduler::end_turn() {
  KVFERRY_CHECK(turn_.has_value(), "a turn ended that had not begun");
  KVFERRY_CHECK(!windows_ || windows_->reading.empty(), "a turn ended within a pass");
  windows_.reset();
  const Turn turn = *std::exchange(turn_, std::nullopt);
  for (const Number number : turn.members) {
    Sequence& sequence = sequences_.at(number);
    sequence.in_turn = false;
    if (sequence.tokens == sequence.most_tokens) {
      finish(number);
    } else if (sequence.tokens < sequence.context) {
      arrivals_.push_back(number);
    } else if (turn.is_prefill) {
      // What is on the device already goes first: the earlier ones have to be loaded anyway.
      ready_.push_front(number);
    } else {
      ready_.push_back(number);
    }
  }
}

void TurnScheduler::finish(Number number) {
  Sequence& sequence = sequences_.at(number);
  sequence.over = true;
  most_blocks_ -= sequence.blocks.size();
  for (std::uint32_t i = 0; i < sequence.blocks.size(); ++i) {
    const Block& block = sequence.blocks[i];
    if (block.where == Where::kAwaitsLoad || (block.where == Where::kHere && !block.storing)) {
      give_up_block(sequence, i);
    }
  }
  drop_if_over(number);
}

void TurnScheduler::drop_if_over(Number number) {
  const Sequence& sequence = sequences_.at(number);
  if (!sequence.over || sequence.jobs > 0) return;
  host_reserved_ -= host_blocks_of(static_cast<std::uint32_t>(sequence.blocks.size()));
  sequences_.erase(number);
}

void TurnScheduler::give_up_block(Sequence& sequence, std::uint32_t index) {
  Block& block = sequence.blocks[index];
  free_.insert(block.device);
  if (block.where == Where::kAwaitsLoad) --sequence.awaiting;
  block.where = Where::kAway;
  sequence.marks.away = std::min(sequence.marks.away, index);
  sequence.marks.not_here = std::min(sequence.marks.not_here, index);
}

// To the front of the order first, and to the next one only when that has all it needs: blocks that
// many wait for would otherwise be held by all of them, and be enough for none.
void TurnScheduler::give_blocks() {
  if (windows_) {
    give_blocks_to_windows();
    // Until its last token it has use for every block that there is.
    if (!is_last_token() || !windows_->away.empty()) return;
  }
  if (turn_ && !limits_.look_ahead) return;
  const std::vector<Number> order = this->order();
  const std::size_t next = next_turn().members.size();
  for (std::size_t place = 0; place < order.size(); ++place) {
    const bool is_next = place < next;
    if (!is_next && (!limits_.look_ahead || free_.empty())) return;
    // Only the next turn takes blocks from others, and only from those behind it.
    if (!give_blocks_to(sequences_.at(order[place]), order, is_next ? next : order.size())) return;
  }
}

bool TurnScheduler::give_blocks_to(Sequence& sequence,
                                   const std::vector<Number>& order,
                                   std::size_t first_victim) {
  if (needs_windows(sequence)) {
    if (!give_needed_blocks(sequence, order, first_victim)) return false;
    if (sequence.tokens < sequence.context) return true;  // it reads nothing
  }
  const std::uint32_t blocks = turn_blocks(sequence);
  for (std::uint32_t& i = sequence.marks.away; i < blocks; ++i) {
    if (sequence.blocks[i].where != Where::kAway) continue;
    if (free_.empty() && !evict_one(order, first_victim)) return false;
    take_free_block(sequence, i);
  }
  return true;
}

// Also from its own blocks: that it gets them must not depend on what others hold.
bool TurnScheduler::give_needed_blocks(Sequence& sequence,
                                       const std::vector<Number>& order,
                                       std::size_t first_victim) {
  const std::uint32_t first = first_needed(sequence);
  const std::uint32_t blocks = turn_blocks(sequence);
  for (std::uint32_t i = first; i < blocks; ++i) {
    if (sequence.blocks[i].where != Where::kAway) continue;
    if (free_.empty() && !evict_one(order, first_victim) && !evict_below(sequence, first)) {
      return false;
    }
    take_free_block(sequence, i);
  }
  return true;
}

void TurnScheduler::take_free_block(Sequence& sequence, std::uint32_t index) {
  Block& block = sequence.blocks[index];
  block.device = *free_.begin();
  free_.erase(free_.begin());
  block.where = index < blocks_of(sequence.tokens) ? Where::kAwaitsLoad : Where::kHere;
  if (block.where == Where::kAwaitsLoad) ++sequence.awaiting;
  sequence.evict_end = std::max(sequence.evict_end, index + 1);
}

bool TurnScheduler::evict_one(const std::vector<Number>& order, std::size_t first_victim) {
  // The turn in windows goes behind all others, and does not read these again before.
  if (windows_ && is_last_token() && evict_read()) return true;
  for (std::size_t place = order.size(); place > first_victim; --place) {
    if (evict_from(sequences_.at(order[place - 1]))) return true;
  }
  return false;
}

// From its end, so that what is left of it is one piece.
bool TurnScheduler::evict_from(Sequence& sequence) {
  const std::uint32_t with_contents = blocks_of(sequence.tokens);
  for (; sequence.evict_end > 0; --sequence.evict_end) {
    const std::uint32_t i = sequence.evict_end - 1;
    if (!may_go(sequence.blocks[i], i < with_contents)) continue;
    give_up_block(sequence, i);
    return true;
  }
  return false;
}

bool TurnScheduler::evict_below(Sequence& sequence, std::uint32_t end) {
  for (std::uint32_t i = std::min(sequence.evict_end, end); i > 0; --i) {
    if (!may_go(sequence.blocks[i - 1], /*has_contents=*/true)) continue;
    give_up_block(sequence, i - 1);
    return true;
  }
  return false;
}

bool TurnScheduler::may_go(const Block& block, bool has_contents) noexcept {
  return block.where == Where::kAwaitsLoad ||
         (block.where == Where::kHere && (block.on_host || !has_contents));
}

std::optional<TurnScheduler::Job> TurnScheduler::next_job() {
  give_blocks();
  if (auto job = next_load()) return job;
  return next_store();
}

std::optional<TurnScheduler::Job> TurnScheduler::next_load() {
  if (loads_ >= limits_.jobs_each_way) return std::nullopt;
  if (auto job = load_of_windows()) return job;
  if (turn_ && !limits_.look_ahead) return std::nullopt;
  for (const Number number : order()) {
    if (auto job = load_of(number)) return job;
  }
  return std::nullopt;
}

std::optional<TurnScheduler::Job> TurnScheduler::load_of(Number number) {
  Sequence& sequence = sequences_.at(number);
  if (sequence.awaiting == 0) return std::nullopt;
  const std::uint32_t blocks = blocks_of(sequence.tokens);
  std::uint32_t& first = sequence.marks.not_here;
  while (first < blocks && sequence.blocks[first].where == Where::kHere) ++first;
  std::vector<Place> places;
  for (std::uint32_t i = first; i < blocks && places.size() < limits_.job_blocks; ++i) {
    const Block& block = sequence.blocks[i];
    if (block.where == Where::kAwaitsLoad) places.push_back({i, block.device});
  }
  for (const Place& place : places) sequence.blocks[place.index].where = Where::kLoading;
  sequence.awaiting -= static_cast<std::uint32_t>(places.size());
  return begin_job(Way::kLoad, number, std::move(places));
}

// First what computes, which is given up next; then from the back of the order, which gives up
// before others; and when there is nothing else to do, what the next turn will not write any more.
std::optional<TurnScheduler::Job> TurnScheduler::next_store() {
  if (stores_ >= limits_.jobs_each_way || !is_oversubscribed()) return std::nullopt;
  if (turn_) {
    for (const Number number : turn_->members) {
      if (auto job = store_of(number, Part::kWholeBlocks)) return job;
    }
  }
  const std::vector<Number> order = this->order();
  const std::size_t next = next_turn().members.size();
  for (std::size_t place = order.size(); place > 0; --place) {
    // A turn in windows may need the places of the next one, too.
    const Part part = place > next || windows_ ? Part::kAll : Part::kWholeBlocks;
    if (auto job = store_of(order[place - 1], part)) return job;
  }
  return std::nullopt;
}

std::optional<TurnScheduler::Job> TurnScheduler::store_of(Number number, Part part) {
  Sequence& sequence = sequences_.at(number);
  const std::uint32_t end =
      part == Part::kAll ? blocks_of(sequence.tokens) : first_written(sequence);
  std::vector<Place> places;
  bool all_stored = true;
  for (std::uint32_t i = sequence.marks.unstored; i < end; ++i) {
    const Block& block = sequence.blocks[i];
    if (all_stored && block.on_host) sequence.marks.unstored = i + 1;
    all_stored = all_stored && block.on_host;
    if (block.where != Where::kHere || block.on_host || block.storing) continue;
    // It is stored beside what is there of it, and there is room for one such block.
    if (block.was_stored && std::exchange(sequence.replacing, true)) continue;
    places.push_back({i, block.device});
    if (places.size() == limits_.job_blocks) break;
  }
  if (places.empty()) return std::nullopt;
  for (const Place& place : places) sequence.blocks[place.index].storing = true;
  return begin_job(Way::kStore, number, std::move(places));
}

TurnScheduler::Job TurnScheduler::begin_job(Way way, Number number, std::vector<Place> places) {
  Job job{next_job_++, way, number, std::move(places)};
  ++sequences_.at(number).jobs;
  ++(way == Way::kLoad ? loads_ : stores_);
  jobs_.emplace(job.id, job);
  return job;
}

void TurnScheduler::job_ended(JobId id, bool done) {
  const auto found = jobs_.find(id);
  KVFERRY_CHECK(found != jobs_.end(), "a job ended twice");
  const Job job = std::move(found->second);
  jobs_.erase(found);
  --(job.way == Way::kLoad ? loads_ : stores_);
  Sequence& sequence = sequences_.at(job.sequence);
  --sequence.jobs;
  for (const Place& place : job.places) {
    Block& block = sequence.blocks[place.index];
    if (job.way == Way::kStore) {
      block.storing = false;
      block.on_host = done;
      if (block.was_stored) sequence.replacing = false;
      block.was_stored = block.was_stored || done;
    } else if (done) {
      block.where = Where::kHere;
    }
    const bool of_no_use = sequence.over || (job.way == Way::kLoad && !done);
    if (of_no_use) give_up_block(sequence, place.index);
    sequence.evict_end = std::max(sequence.evict_end, place.index + 1);
  }
  if (job.way == Way::kLoad) window_load_ended(job, done);
  drop_if_over(job.sequence);
}

void TurnScheduler::doubt_host() {
  for (auto& [number, sequence] : sequences_) {
    for (std::uint32_t i = 0; i < sequence.blocks.size(); ++i) {
      Block& block = sequence.blocks[i];
      if (block.where != Where::kHere || !block.on_host) continue;
      block.on_host = false;
      sequence.marks.unstored = std::min(sequence.marks.unstored, i);
    }
  }
}

std::uint32_t TurnScheduler::device_block(Number number, std::uint32_t index) const {
  const Block& block = sequences_.at(number).blocks.at(index);
  KVFERRY_CHECK(block.where == Where::kHere, "a block is asked for that is not on the device");
  return block.device;
}

bool TurnScheduler::is_present(Number number) const {
  const auto found = sequences_.find(number);
  return found != sequences_.end() && !found->second.over;
}

void TurnScheduler::check() const {
  std::set<std::uint32_t> owned(free_);
  std::uint64_t host = 0;
  std::uint64_t most = 0;
  for (const auto& [number, sequence] : sequences_) {
    host += host_blocks_of(static_cast<std::uint32_t>(sequence.blocks.size()));
    if (!sequence.over) most += sequence.blocks.size();
    std::uint32_t awaiting = 0;
    std::uint32_t replaced = 0;
    for (std::uint32_t i = 0; i < sequence.blocks.size(); ++i) {
      const Block& block = sequence.blocks[i];
      if (block.where == Where::kAwaitsLoad) ++awaiting;
      if (block.where != Where::kAway) {
        KVFERRY_CHECK(owned.insert(block.device).second, "a device block has two owners");
      }
      const bool has_contents = i < blocks_of(sequence.tokens);
      KVFERRY_CHECK(!has_contents || sequence.over || block.where == Where::kHere || block.on_host,
                    "the contents of a block are nowhere");
      KVFERRY_CHECK(!block.storing || (block.where == Where::kHere && !block.on_host),
                    "a block is stored for nothing");
      KVFERRY_CHECK(block.where != Where::kLoading || sequence.jobs > 0, "nobody loads a block");
      if (block.storing && block.was_stored) ++replaced;
    }
    KVFERRY_CHECK(replaced == (sequence.replacing ? 1U : 0U),
                  "blocks are replaced beyond their room");
    KVFERRY_CHECK(awaiting == sequence.awaiting, "loads are counted wrongly");
  }
  KVFERRY_CHECK(owned.size() == limits_.device_blocks, "a device block has no owner");
  KVFERRY_CHECK(host == host_reserved_ && host <= limits_.host_blocks,
                "host memory is counted wrongly");
  KVFERRY_CHECK(most == most_blocks_, "blocks are counted wrongly");
  KVFERRY_CHECK(loads_ + stores_ == jobs_.size(), "jobs are counted wrongly");
}

}  // namespace kvferry::cli
