// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/pool_checks.hpp"

#include "kvferry/ipc/base/checksum.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Of stores that were answered and whose sums are not computed yet: beyond it the next ones get
/// none, so that a mover that has no processor to spare does not remember ever more of them. The
/// manager counts the blocks that have none.
constexpr std::size_t kMostPartsToSum = std::size_t{1} << 17;
/// A load is checked by several: one reads some 9 GB/s.
constexpr unsigned kMostCheckers = 8;
/// Between two looks at what else there is to do, and what one checker takes before the next one
/// helps: 50 us of one processor.
constexpr std::size_t kPiecesOfATurn = 4;
/// Of loads that are checked while they are copied, for which nobody waits before both are done:
/// one checker for each 8 MiB. More take memory bandwidth and processors from whatever is urgent.
constexpr std::size_t kPiecesOfAChecker = 64;  ///< And of its turn.

}  // namespace

PoolChecks::PoolChecks(Done done, Summed summed, std::function<void()> decided)
    : done_(std::move(done)), summed_(std::move(summed)), decided_(std::move(decided)) {
  const unsigned checkers = std::clamp(std::thread::hardware_concurrency() / 2, 1U, kMostCheckers);
  for (unsigned i = 0; i < checkers; ++i) {
    threads_.push_back(std::make_unique<ipc::OwnThread>("kvf-check", ipc::OwnThread::Runs::kOurCode,
                                                        [this] { run_checks(); }));
  }
  start_sums(/*at_once=*/false);
}

void PoolChecks::sum_at_once(bool at_once) {
  if (at_once == sums_at_once_) return;
  sums_at_once_ = at_once;
  start_sums(at_once);
}

// A thread that runs when nothing else wants to may not be allowed to become an ordinary one again:
// another one takes its work, once it has noticed. It needs a moment of a processor for that.
void PoolChecks::start_sums(bool at_once) {
  while (sum_threads_.size() > 1) {
    // wait-brief: threads whose turn was over with the last change; limit OwnThread::kEndsWithin
    sum_threads_.front()->wait_end();
    sum_threads_.pop_front();
  }
  const std::uint32_t turn = ++sums_turn_;
  ++arrivals_;
  arrivals_.notify_all();
  sum_threads_.push_back(
      std::make_unique<ipc::OwnThread>("kvf-sums", ipc::OwnThread::Runs::kOurCode,
                                       [this, at_once, turn] { run_sums(at_once, turn); }));
}

PoolChecks::~PoolChecks() {
  stop();
  std::unique_ptr<Arrived> left(arrived_.exchange(nullptr));
  while (left != nullptr) left = std::move(left->before);
}

void PoolChecks::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  sums_stop_ = true;
  ++arrivals_;
  arrivals_.notify_all();
  // wait-brief: our threads, each in a piece or a part at most; limit OwnThread::kEndsWithin
  for (const auto& thread : threads_) thread->wait_end();
  threads_.clear();
  // wait-brief: our threads, each in a part at most; limit OwnThread::kEndsWithin
  for (const auto& thread : sum_threads_) thread->wait_end();
  sum_threads_.clear();
  const std::lock_guard lock(mutex_);
  for (const auto& [job, work] : under_way_) {
    if (work->gate != nullptr && !work->is_checked) work->gate->decide(false);
  }
}

bool PoolChecks::names_sums(const ipc::MoverJob& job) noexcept {
  return job.direction == ipc::CopyDirection::kHostToDevice &&
         std::any_of(job.items.begin(), job.items.end(), [](const ipc::MoverItem& item) {
           return item.shard_sum != 0 || item.replicated_sum != 0;
         });
}

PoolChecks::WorkRef PoolChecks::work_of(const ipc::MoverJob& job,
                                        const std::shared_ptr<ipc::PoolMapping>& pool,
                                        const BlockParts& parts,
                                        bool is_check) {
  auto work = std::make_shared<Work>();
  work->job = job.job;
  work->pool = pool;
  work->items = job.items.size();
  work->is_check = is_check;
  work->sums_first = !is_check && job.sums_first;
  work->urgency = job.urgency;
  for (std::size_t i = 0; i < job.items.size(); ++i) {
    const ipc::MoverItem& item = job.items[i];
    if (!parts.has(item.group)) continue;  // it will be refused
    if (!is_check || item.shard_sum != 0) {
      work->parts.push_back({item.shard_offset, parts.sharded_bytes(item.group), item.shard_sum, 0,
                             i, /*is_shard=*/true});
    }
    if (item.with_replicated && (!is_check || item.replicated_sum != 0)) {
      work->parts.push_back({item.replicated_offset, parts.replicated_bytes(item.group),
                             item.replicated_sum, 0, i, /*is_shard=*/false});
    }
  }
  if (is_check) cut(*work);
  if (is_check && job.layers) work->gate = std::make_shared<LoadCheck>();
  return work;
}

ipc::Result<std::shared_ptr<const LoadCheck>> PoolChecks::begin(
    const ipc::MoverJob& job,
    const std::shared_ptr<ipc::PoolMapping>& pool,
    const BlockParts& parts) {
  const bool is_check = names_sums(job);
  if (!is_check && !job.wants_sums) return std::shared_ptr<const LoadCheck>();
  WorkRef work = work_of(job, pool, parts, is_check);
  const std::lock_guard lock(mutex_);
  if (!under_way_.emplace(job.job, work).second) {
    return KVFERRY_ERROR(kInvalidArgument, "job {} runs already", job.job.value);
  }
  if (is_check) queue_check(work);
  return std::shared_ptr<const LoadCheck>(work->gate);
}

void PoolChecks::queue_check(const WorkRef& work) {
  ++waiting_;
  const auto place = std::find_if(checks_.begin(), checks_.end(), [&work](const WorkRef& queued) {
    return work->urgency.goes_before(queued->urgency);
  });
  checks_.insert(place, work);
  if (work->gate == nullptr) beside_pieces_ += work->pieces.size();
  const std::size_t turns = work->pieces.size() / kPiecesOfATurn + 1;
  for (std::size_t i = 0; i < std::min<std::size_t>(turns, kMostCheckers); ++i) {
    changed_.notify_one();
  }
}

bool PoolChecks::drop_check(const WorkRef& work) {
  if (work->left == 0) return false;  // somebody ends it right now
  work->is_dropped = true;
  const std::size_t first = work->next;
  take_up_to(*work, work->pieces.size());
  work->left -= work->pieces.size() - first;
  std::erase(checks_, work);
  if (work->left > 0) return false;
  --waiting_;
  return true;
}

void PoolChecks::finish(ipc::MoverJobDone done) {
  WorkRef work;
  {
    const std::lock_guard lock(mutex_);
    const auto at = under_way_.find(done.job);
    if (at == under_way_.end()) {
      work = nullptr;
    } else if (at->second->is_check && !at->second->is_checked) {
      const bool is_lost = std::none_of(done.results.begin(), done.results.end(),
                                        [](std::uint8_t result) { return result == 0; });
      // What its check has found counts no more, but for the load by layers that it has ended.
      if (!is_lost || !drop_check(at->second)) {
        at->second->held = std::move(done);
        return;
      }
      under_way_.erase(at);
    } else {
      work = at->second;
      // What failed may hold anything.
      if (!work->is_check) {
        std::erase_if(work->parts,
                      [&done](const Part& part) { return done.results.at(part.item) != 0; });
      }
      if (work->sums_first && !work->parts.empty()) {
        work->held = std::move(done);
        cut(*work);
        queue_check(work);
        return;
      }
      under_way_.erase(at);
    }
  }
  if (work != nullptr && work->is_check) {
    merge(done, *work);
  } else if (work != nullptr && !work->parts.empty()) {
    queue_sums(std::move(work));
  }
  done_(std::move(done));
}

bool PoolChecks::idle() {
  const std::lock_guard lock(mutex_);
  return waiting_ == 0;
}

void PoolChecks::queue_sums(WorkRef work) {
  const std::size_t count = work->parts.size();
  if (parts_to_sum_.fetch_add(count) + count > kMostPartsToSum) {
    parts_to_sum_ -= count;
    return;
  }
  ++sums_queued_;
  work->answered_pool = std::exchange(work->pool, nullptr);
  give_to_sum(std::move(work));
}

void PoolChecks::give_to_sum(WorkRef work) {
  auto arrived = std::make_unique<Arrived>();
  arrived->work = std::move(work);
  Arrived* head = arrived_.load();
  do {
    (void)arrived->before.release();  // of the round before
    arrived->before.reset(head);
  } while (!arrived_.compare_exchange_weak(head, arrived.get()));
  (void)arrived.release();  // the list's
  ++arrivals_;
  // Two may wait for a moment, of which one is to end.
  arrivals_.notify_all();
}

std::deque<PoolChecks::WorkRef> PoolChecks::take_arrived(std::uint32_t turn) {
  for (;;) {
    const std::uint32_t seen = arrivals_.load();
    if (sums_stop_ || turn != sums_turn_) return {};
    std::deque<WorkRef> works;
    // One by one: the list may be long.
    std::unique_ptr<Arrived> last(arrived_.exchange(nullptr));
    while (last != nullptr) {
      works.push_front(std::move(last->work));
      last = std::move(last->before);
    }
    if (!works.empty()) return works;
    // wait-idle: stores that have ended; queue_sums() or the end; thread kvf-sums
    arrivals_.wait(seen);
  }
}

void PoolChecks::run_checks() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // wait-idle: loads to check; begin() or the end; thread kvf-check
    auto next = checks_.end();
    changed_.wait(lock, [&] {
      next = next_check();
      return stopping_ || next != checks_.end();
    });
    if (stopping_) return;
    take_pieces(lock, *next);
  }
}

void PoolChecks::run_sums(bool at_once, std::uint32_t turn) {
  // It is not missed: what has no checksum is not kept for another manager, and not checked.
  const sched_param none{};
  if (!at_once && ::sched_setscheduler(0, SCHED_IDLE, &none) != 0) {
    ipc::log_debug("checksums are computed at normal priority");
  }
  for (;;) {
    std::deque<WorkRef> works = take_arrived(turn);
    if (works.empty()) return;
    while (!works.empty()) {
      const WorkRef work = works.front();
      bool has_pool = true;
      if (!sum_parts(*work, turn, has_pool)) {
        // Whose turn it is begins this store anew.
        for (WorkRef& left : works) give_to_sum(std::move(left));
        return;
      }
      works.pop_front();
      parts_to_sum_ -= work->parts.size();
      end_sums(*work, has_pool);
    }
  }
}

bool PoolChecks::sum_parts(Work& work, std::uint32_t turn, bool& has_pool) {
  for (Part& part : work.parts) {
    if (sums_stop_ || turn != sums_turn_) return false;
    // Part by part: whoever lets the pool go does not wait for all of them.
    const auto pool = work.answered_pool.lock();
    has_pool = has_pool && pool != nullptr;
    if (has_pool) part.sum = ipc::checksum(pool->bytes(part.offset, part.size_bytes));
  }
  return true;
}

std::deque<PoolChecks::WorkRef>::iterator PoolChecks::next_check() {
  const std::size_t most = 1 + beside_pieces_ / kPiecesOfAChecker;
  return std::find_if(checks_.begin(), checks_.end(), [this, most](const WorkRef& work) {
    return work->gate != nullptr || beside_ < most;
  });
}

void PoolChecks::take_up_to(Work& work, std::size_t end) {
  if (work.gate == nullptr) beside_pieces_ -= end - work.next;
  work.next = end;
}

void PoolChecks::take_pieces(std::unique_lock<std::mutex>& lock, WorkRef work) {
  const bool is_beside = work->gate == nullptr;
  const std::size_t first = work->next;
  const std::size_t end =
      std::min(work->pieces.size(), first + (is_beside ? kPiecesOfAChecker : kPiecesOfATurn));
  take_up_to(*work, end);
  if (end == work->pieces.size()) std::erase(checks_, work);
  if (is_beside) ++beside_;
  lock.unlock();
  for (std::size_t i = first; i < end; ++i) {
    Piece& piece = work->pieces[i];
    piece.sum = ipc::checksum(work->pool->bytes(piece.offset, piece.size_bytes));
  }
  lock.lock();
  if (is_beside) --beside_;
  work->left -= end - first;
  if (work->left > 0) return;
  const bool is_dropped = work->is_dropped;
  lock.unlock();
  end_check(work, is_dropped);
  lock.lock();
}

void PoolChecks::cut(Work& work) {
  for (const Part& part : work.parts) {
    std::uint64_t done = 0;
    do {
      const std::uint64_t bytes =
          std::min<std::uint64_t>(part.size_bytes - done, ipc::kChecksumPieceBytes);
      work.pieces.push_back({part.offset + done, bytes});
      done += bytes;
    } while (done < part.size_bytes);
  }
  work.left = work.pieces.size();
}

void PoolChecks::join(Work& work) {
  std::size_t at = 0;
  std::vector<std::uint64_t> sums;
  for (Part& part : work.parts) {
    sums.clear();
    std::uint64_t bytes = 0;
    do {
      sums.push_back(work.pieces[at].sum);
      bytes += work.pieces[at++].size_bytes;
    } while (bytes < part.size_bytes);
    part.sum = ipc::combine_checksums(sums);
  }
}

void PoolChecks::end_check(const WorkRef& work, bool is_dropped) {
  std::vector<std::uint8_t> results(work->items, 0);
  if (!is_dropped) {
    join(*work);
    if (work->is_check) results = results_of(*work);
  }
  const bool is_good = !is_dropped && std::all_of(results.begin(), results.end(),
                                                  [](std::uint8_t result) { return result == 0; });
  std::optional<ipc::MoverJobDone> held;
  {
    const std::lock_guard lock(mutex_);
    work->results = std::move(results);
    work->is_checked = true;
    held = std::exchange(work->held, std::nullopt);
    if (held) under_way_.erase(work->job);
  }
  if (work->gate != nullptr) {
    work->gate->decide(is_good);
    decided_();
  }
  if (held) {
    if (work->sums_first) {
      ipc::MoverSums sums = sums_of(*work);
      held->replicated_sums = std::move(sums.replicated);
      held->shard_sums = std::move(sums.shard);
    }
    merge(*held, *work);
    done_(std::move(*held));
  }
  const std::lock_guard lock(mutex_);
  --waiting_;
}

ipc::MoverSums PoolChecks::sums_of(const Work& work) {
  ipc::MoverSums sums;
  sums.job = work.job;
  sums.shard.assign(work.items, 0);
  sums.replicated.assign(work.items, 0);
  for (const Part& part : work.parts) {
    (part.is_shard ? sums.shard : sums.replicated)[part.item] = part.sum;
  }
  return sums;
}

void PoolChecks::end_sums(const Work& work, bool has_pool) {
  if (!has_pool) return summed_({}, {});
  std::vector<ipc::KeptSum> places;
  for (const Part& part : work.parts) {
    if (part.size_bytes > 0) places.push_back({work.job, part.offset, part.sum});
  }
  summed_(sums_of(work), std::move(places));
}

std::vector<std::uint8_t> PoolChecks::results_of(const Work& work) {
  std::vector<std::uint8_t> results(work.items, 0);
  for (const Part& part : work.parts) {
    if (part.sum == part.expected) continue;
    results[part.item] = static_cast<std::uint8_t>(ipc::ErrorCode::kCorrupt);
    ipc::log_error(
        "job {}: host memory at {} of the pool, {} bytes, has checksum {:x}, it was "
        "stored with {:x}",
        work.job.value, part.offset, part.size_bytes, part.sum, part.expected);
  }
  return results;
}

void PoolChecks::merge(ipc::MoverJobDone& done, const Work& work) {
  constexpr auto kCancelled = static_cast<std::uint8_t>(ipc::ErrorCode::kCancelled);
  for (std::size_t i = 0; i < work.results.size() && i < done.results.size(); ++i) {
    // One that is damaged ends its whole load by layers: this is why.
    const bool is_open = done.results[i] == 0 || (work.gate && done.results[i] == kCancelled);
    if (work.results[i] == 0 || !is_open) continue;
    done.results[i] = work.results[i];
    if (done.message.empty()) done.message = "some blocks are damaged in host memory";
  }
}

}  // namespace kvferry::cache_manager
