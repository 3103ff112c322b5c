// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefetcher.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <algorithm>
#include <span>
#include <utility>

namespace kvferry::worker {
namespace {

/// Of one prefetch: one is copied while the next one is there.
constexpr std::size_t kJobsAtATime = 2;

constexpr std::uint8_t result_of(ipc::ErrorCode code) { return static_cast<std::uint8_t>(code); }

}  // namespace

std::string_view to_string(PrefetchStop stop) noexcept {
  switch (stop) {
    case PrefetchStop::kBestEffort: return "best-effort";
    case PrefetchStop::kWait: return "wait";
    case PrefetchStop::kTimeout: return "timeout";
  }
  return "best-effort";
}

ipc::Result<PrefetchStop> parse_prefetch_stop(std::string_view text) {
  for (const auto stop : {PrefetchStop::kBestEffort, PrefetchStop::kWait, PrefetchStop::kTimeout}) {
    if (text == to_string(stop)) return stop;
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of best-effort|wait|timeout", text);
}

Prefetcher::Prefetcher(PrefetchOptions options, Transport transport)
    : options_(options), transport_(std::move(transport)) {
  KVFERRY_CHECK(options_.blocks_per_job > 0, "a prefetch needs jobs of at least one block");
  // A larger job would be refused, and with it every prefetch.
  options_.blocks_per_job = std::min<std::size_t>(options_.blocks_per_job, ipc::kMaxWireElements);
}

ipc::TimePoint Prefetcher::deadline_of(const Prefetch& prefetch) const {
  switch (options_.stop) {
    case PrefetchStop::kBestEffort: break;
    case PrefetchStop::kWait: return prefetch.begun + options_.wait_limit;
    case PrefetchStop::kTimeout:
      return prefetch.begun + options_.timeout +
             options_.timeout_per_block * static_cast<ipc::Duration::rep>(prefetch.items.size());
  }
  return prefetch.begun;
}

ipc::Status Prefetcher::begin(Id id, std::vector<LoadItem> items, ipc::TimePoint now) {
  KVFERRY_CHECK(!items.empty() && !prefetches_.contains(id), "a prefetch of nothing, or twice");
  Prefetch prefetch;
  prefetch.items = std::move(items);
  prefetch.begun = now;
  ipc::Status sent = send_more(id, prefetch, now);
  if (prefetch.jobs == 0) return sent;
  ++counts_.requests;
  counts_.asked += prefetch.items.size();
  prefetches_.emplace(id, std::move(prefetch));
  return ipc::ok();
}

ipc::Status Prefetcher::send_more(Id id, Prefetch& prefetch, ipc::TimePoint now) {
  // One that nobody waits for is of use until its request starts, whenever that is.
  std::optional<ipc::TimePoint> due;
  if (options_.stop != PrefetchStop::kBestEffort) due = deadline_of(prefetch);
  while (prefetch.jobs < kJobsAtATime && prefetch.sent < prefetch.items.size()) {
    const std::size_t blocks =
        std::min(options_.blocks_per_job, prefetch.items.size() - prefetch.sent);
    const auto items = std::span(prefetch.items).subspan(prefetch.sent, blocks);
    KVFERRY_ASSIGN(const ipc::JobId job, transport_.load(items, options_.priority, due));
    jobs_.emplace(job, Job{id, {items.begin(), items.end()}, now, true});
    prefetch.sent += blocks;
    ++prefetch.jobs;
  }
  return ipc::ok();
}

std::optional<Prefetcher::Landing> Prefetcher::on_completion(const Completion& completion,
                                                             ipc::TimePoint now) {
  auto found = jobs_.extract(completion.job);
  if (found.empty()) return std::nullopt;
  Job& job = found.mapped();
  Landing landing{job.id, job.wanted, std::move(job.items), {}, completion.bytes, job.submitted};
  std::size_t loaded = 0;
  for (std::size_t i = 0; i < landing.items.size(); ++i) {
    // An answer that is too short says nothing of what it leaves out: not done.
    landing.results.push_back(i < completion.results.size() ? completion.results[i]
                                                            : result_of(ipc::ErrorCode::kProtocol));
    if (landing.results.back() == 0) ++loaded;
  }
  if (!job.wanted) return landing;
  Prefetch& prefetch = prefetches_.at(job.id);
  --prefetch.jobs;
  counts_.arrived += loaded;
  counts_.failed += landing.items.size() - loaded;
  // Behind a block that did not come nothing is of use.
  const bool goes_on = loaded == landing.items.size() && send_more(job.id, prefetch, now);
  if (goes_on) return landing;
  for (std::size_t i = prefetch.sent; i < prefetch.items.size(); ++i) {
    landing.items.push_back(prefetch.items[i]);
    landing.results.push_back(result_of(ipc::ErrorCode::kCancelled));
    ++counts_.failed;
  }
  prefetch.items.resize(prefetch.sent);
  return landing;
}

Prefetcher::Turn Prefetcher::turn(Id id, ipc::TimePoint now) const {
  const auto found = prefetches_.find(id);
  if (found == prefetches_.end()) return {};
  const Prefetch& prefetch = found->second;
  const ipc::TimePoint deadline = deadline_of(prefetch);
  const bool over = prefetch.jobs == 0 && prefetch.sent == prefetch.items.size();
  return {over || now >= deadline, deadline};
}

std::vector<LoadItem> Prefetcher::stop(Id id) {
  auto found = prefetches_.extract(id);
  if (found.empty()) return {};
  const Prefetch& prefetch = found.mapped();
  for (auto& [number, job] : jobs_) {
    if (job.id != id) continue;
    job.wanted = false;
    counts_.cancelled += job.items.size();
    transport_.cancel(number);
  }
  const auto unsent = std::span(prefetch.items).subspan(prefetch.sent);
  counts_.cancelled += unsent.size();
  return {unsent.begin(), unsent.end()};
}

}  // namespace kvferry::worker
