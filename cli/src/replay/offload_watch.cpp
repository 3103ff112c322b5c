// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/offload_watch.hpp"

#include <fmt/format.h>

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// What is over sooner is not worth a line.
constexpr ipc::Duration kNoticeable = 1s;
constexpr ipc::Duration kLongStart = 5s;
constexpr ipc::Duration kSayAgain = 15s;

double seconds(ipc::Duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

ipc::Status OffloadWatch::update(const Sight& sight, ipc::TimePoint now) {
  if (!first_) first_ = now;
  if (!sight.playing) return wait_for_start(now);
  if (!sight.cache_ready || sight.offload_ready) {
    if (!down_since_) return ipc::ok();
    down_s_ += seconds(now - counted_to_);
    const double lasted = seconds(now - *down_since_);
    down_since_.reset();
    if (!std::exchange(said_, false)) return ipc::ok();
    hooks_.say(sight.offload_ready
                   ? fmt::format("offload is ready again after {:.1f} s", lasted)
                   : fmt::format("the cache went away after {:.1f} s without offload", lasted));
    return ipc::ok();
  }
  return go_without(sight, now);
}

ipc::Status OffloadWatch::wait_for_start(ipc::TimePoint now) {
  const ipc::Duration waited = now - *first_;
  if (waited > options_.start_limit) {
    return KVFERRY_ERROR(kTimeout, "offload was not ready within {:.0f} s: {}",
                         seconds(options_.start_limit), hooks_.reasons());
  }
  if (waited > kLongStart && (!said_ || now - said_at_ > kSayAgain)) {
    said_ = true;
    said_at_ = now;
    hooks_.say(
        fmt::format("waiting since {:.0f} s for offload: {}", seconds(waited), hooks_.reasons()));
  }
  return ipc::ok();
}

ipc::Status OffloadWatch::go_without(const Sight& sight, ipc::TimePoint now) {
  if (!down_since_) {
    down_since_ = counted_to_ = explained_at_ = now;
    deaths_ = sight.deaths;
    said_ = false;
  }
  down_s_ += seconds(now - counted_to_);
  counted_to_ = now;
  if (deaths_ != sight.deaths) {
    deaths_ = sight.deaths;
    explained_at_ = now;
  }
  if (!said_ && now - *down_since_ > kNoticeable) {
    said_ = true;
    hooks_.say(fmt::format("offload is not ready, blocks are computed and not stored: {}",
                           hooks_.reasons()));
  }
  if (now - explained_at_ > options_.patience) {
    return KVFERRY_ERROR(kTimeout, "offload was away for {:.0f} s although no process died: {}",
                         seconds(now - *down_since_), hooks_.reasons());
  }
  return ipc::ok();
}

}  // namespace kvferry::cli
