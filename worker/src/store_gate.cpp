// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_gate.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>

namespace kvferry::worker {

std::size_t StoreGate::room(ipc::TimePoint now) const noexcept {
  if (now < closed_until_) return 0;
  if (options_.most_blocks == 0) return SIZE_MAX;
  return options_.most_blocks - std::min(under_way_, options_.most_blocks);
}

bool StoreGate::is_open(ipc::TimePoint now) const noexcept { return room(now) > 0; }

std::size_t StoreGate::admit(std::size_t blocks, ipc::TimePoint now) {
  const std::size_t admitted = std::min(blocks, room(now));
  (now < closed_until_ ? counts_.dropped_room : counts_.dropped_queue) += blocks - admitted;
  return admitted;
}

void StoreGate::end(std::size_t blocks) noexcept {
  KVFERRY_CHECK(blocks <= under_way_, "more stores ended than began");
  under_way_ -= blocks;
}

void StoreGate::on_failed(ipc::TimePoint now) noexcept {
  closed_until_ = std::max(closed_until_, now + options_.full_pause);
}

void StoreGate::on_full(std::size_t blocks, ipc::TimePoint now) noexcept {
  if (blocks == 0) return;
  counts_.dropped_room += blocks;
  closed_until_ = now + options_.full_pause;
}

}  // namespace kvferry::worker
