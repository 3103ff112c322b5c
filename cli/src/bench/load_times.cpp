// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/load_times.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <chrono>
#include <fstream>

namespace kvferry::cli {
namespace {

std::uint64_t ns_of(ipc::TimePoint time) {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

}  // namespace

ipc::Status LoadTimes::read() {
  std::ifstream in(file_, std::ios::binary);
  in.seekg(static_cast<std::streamoff>(ends_.size() * sizeof(std::uint64_t)));
  for (std::uint64_t end = 0; in.read(reinterpret_cast<char*>(&end), sizeof(end));) {
    if (!ends_.empty() && end < ends_.back()) {
      return KVFERRY_ERROR(kProtocol,
                           "{}: round {} of the load ended at {} ns, the one before at {}",
                           file_.native(), ends_.size(), end, ends_.back());
    }
    ends_.push_back(end);
  }
  return ipc::ok();
}

std::optional<ipc::TimePoint> LoadTimes::last() const {
  if (ends_.empty()) return std::nullopt;
  return ipc::TimePoint(std::chrono::duration_cast<ipc::Duration>(
      std::chrono::nanoseconds(static_cast<std::int64_t>(ends_.back()))));
}

void LoadTimes::add_within(ipc::TimePoint from, ipc::TimePoint to, Samples& rounds) const {
  auto at = std::lower_bound(ends_.begin(), ends_.end(), ns_of(from));
  const auto end = std::upper_bound(at, ends_.end(), ns_of(to));
  if (at == end) return;
  for (auto next = std::next(at); next != end; at = next++) {
    rounds.add(static_cast<double>(*next - *at) / 1e3);
  }
}

RanksLoadTimes::RanksLoadTimes(const std::vector<std::filesystem::path>& files) {
  KVFERRY_CHECK(!files.empty(), "times of no rank's load");
  ranks_.reserve(files.size());
  for (const std::filesystem::path& file : files) ranks_.emplace_back(file);
}

ipc::Status RanksLoadTimes::read() {
  for (LoadTimes& rank : ranks_) KVFERRY_TRY(rank.read());
  return ipc::ok();
}

std::optional<ipc::TimePoint> RanksLoadTimes::last() const {
  std::optional<ipc::TimePoint> least = ranks_.front().last();
  for (const LoadTimes& rank : ranks_) {
    const auto last = rank.last();
    if (!last) return std::nullopt;
    least = std::min(*least, *last);
  }
  return least;
}

void RanksLoadTimes::add_within(ipc::TimePoint from, ipc::TimePoint to, Samples& rounds) const {
  std::vector<double> slowest;
  for (const LoadTimes& rank : ranks_) {
    Samples own;
    rank.add_within(from, to, own);
    if (&rank == &ranks_.front()) slowest = own.values();
    slowest.resize(std::min(slowest.size(), own.size()));
    for (std::size_t i = 0; i < slowest.size(); ++i) {
      slowest[i] = std::max(slowest[i], own.values()[i]);
    }
  }
  for (const double round : slowest) rounds.add(round);
}

}  // namespace kvferry::cli
