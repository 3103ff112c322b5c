// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/kept_sums.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace kvferry::cache_manager {

void KeptSums::add(const std::vector<ipc::KeptSum>& sums) {
  ++stores_;
  sums_.insert(sums_.end(), sums.begin(), sums.end());
  while (sums_.size() > kMost) {
    sums_.pop_front();
    if (asked_ && asked_->told > 0) --asked_->told;
  }
  // Who asks counts by position.
  if (!asked_ && sums_.size() >= many_) drop_replaced();
}

// A place is written again only once what was there has left the catalogue, so nobody misses the
// sums of before.
void KeptSums::drop_replaced() {
  std::unordered_set<std::uint64_t> places;
  std::deque<ipc::KeptSum> last;
  for (std::size_t i = sums_.size(); i-- > 0;) {
    if (places.insert(sums_[i].offset).second) last.push_front(sums_[i]);
  }
  sums_ = std::move(last);
  many_ = std::max(kFew, 2 * sums_.size());
}

void KeptSums::tell(std::uint64_t queued) { asked_ = Asked{queued}; }

std::optional<ipc::KeptSums> KeptSums::next() {
  if (!asked_) return std::nullopt;
  ipc::KeptSums message;
  const std::size_t count = std::min(sums_.size() - asked_->told, kMostInMessage);
  const auto first = sums_.begin() + static_cast<std::ptrdiff_t>(asked_->told);
  message.sums.assign(first, first + static_cast<std::ptrdiff_t>(count));
  asked_->told += count;
  message.is_last = asked_->told == sums_.size() && stores_ >= asked_->queued;
  if (message.is_last) {
    asked_.reset();
  } else if (count == 0) {
    return std::nullopt;
  }
  return message;
}

void KeptSums::forget() {
  sums_.clear();
  many_ = kFew;
  if (asked_) asked_->told = 0;
}

}  // namespace kvferry::cache_manager
