// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/quarantine.hpp"

#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "lease/borrowed_remains.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

namespace kvferry::ipc::lease {
namespace {

std::optional<std::uint64_t> free_bytes(Device& device) {
  const auto memory = device.memory_info();
  if (!memory) {
    log_warn("lease: device memory cannot be read: {}", memory.error().to_string());
    return std::nullopt;
  }
  return memory->free_bytes;
}

}  // namespace

std::string describe(const std::vector<pid_t>& pids) {
  return fmt::format("{}", fmt::join(pids, ", "));
}

Quarantine::~Quarantine() {
  for (QuarantineItem& item : items_) {
    if (!item.arena || !item.arena->mapped()) continue;
    // Freeing under a living mapping is undefined: the driver takes the memory back when this
    // process ends, so it is left to that.
    log_error("lease: epoch {} stays allocated until this process ends: {} bytes kept by {}",
              item.epoch.value, item.bytes, item.holder);
    keep_until_process_end(std::move(*item.arena));
    keep_until_process_end(std::move(item.ranges));
  }
}

void Quarantine::add(QuarantineItem item) {
  log_warn("lease: epoch {} quarantined: {} kept by {}", item.epoch.value, format_size(item.bytes),
           item.holder);
  items_.push_back(std::move(item));
}

bool Quarantine::try_release(QuarantineItem& item, std::uint64_t arena_bytes) {
  const auto holders = item.arena->mapped_elsewhere();
  if (!holders) {
    log_warn("lease: epoch {}: who maps it cannot be told: {}", item.epoch.value,
             holders.error().to_string());
    return false;
  }
  if (!holders->empty()) {
    item.holder = fmt::format("process {}", lease::describe(*holders));
    return false;
  }
  const auto before = free_bytes(device_);
  item.check = ReturnCheck(*item.arena, before.value_or(0) + arena_bytes);
  freeing_(item.epoch);
  const Status released = item.arena->release();
  const bool borrowed = item.arena->is_borrowed();
  if (!released) {
    log_error("lease: quarantined epoch {}: {}", item.epoch.value, released.error().to_string());
    if (borrowed) {
      item.failure = released.error().message;
    } else {
      item.settle = true;
    }
  }
  if (borrowed) return true;
  item.arena.reset();
  item.ranges.clear();
  return true;
}

bool Quarantine::try_end(QuarantineItem& item, const Arena* mapped) {
  const std::uint64_t arena_bytes = mapped == nullptr ? 0 : mapped->total_bytes();
  if (item.own_user) {
    // The user was given its full drain time before; now it is only asked.
    if (const Status idle = user_.quiesce(item.epoch, Deadline::after(Duration::zero())); !idle) {
      return false;
    }
    user_.on_unmapped(item.epoch);
    item.own_user = false;
  }
  if (item.arena && item.arena->mapped() && !try_release(item, arena_bytes)) return false;
  std::uint64_t expected = item.bytes;
  if (item.arena) {
    const Remains remains = look_at_remains(*item.arena, [&](AllocationId id) {
      return (mapped != nullptr && lease::lends(*mapped, id)) || lends(id);
    });
    if (remains.allocations > 0) {
      item.holder = describe_remains(remains, item.failure);
      return false;
    }
    expected -= std::min(expected, remains.shared_bytes);
  }
  if (!item.settle) return true;
  const auto now = free_bytes(device_);
  return now && item.check.is_back(*now + arena_bytes, expected);
}

bool Quarantine::lends(AllocationId id) const {
  return std::any_of(items_.begin(), items_.end(), [id](const QuarantineItem& item) {
    return item.arena && lease::lends(*item.arena, id);
  });
}

std::string Quarantine::overlap_with(const Arena& arena) const {
  for (const QuarantineItem& item : items_) {
    std::string overlap = item.arena ? arena.overlap_with(*item.arena) : std::string();
    if (!overlap.empty()) return overlap;
  }
  return {};
}

std::vector<Epoch> Quarantine::reap(const std::function<bool(Epoch)>& living,
                                    const std::function<bool(Epoch)>& died,
                                    const Arena* mapped) {
  std::vector<Epoch> ended;
  for (std::size_t i = 0; i < items_.size();) {
    QuarantineItem& item = items_[i];
    // A holder that has died since may have left a forked child behind.
    item.settle = item.settle || died(item.epoch);
    if (living(item.epoch) || !try_end(item, mapped)) {
      ++i;
      continue;
    }
    log_info("lease: quarantine of epoch {} ended: {} given back", item.epoch.value,
             format_size(item.bytes));
    ended.push_back(item.epoch);
    const std::uint64_t bytes = item.bytes;
    items_.erase(items_.begin() + static_cast<std::ptrdiff_t>(i));
    // What came back for this one must not be counted for another as well.
    for (QuarantineItem& other : items_) other.check.discount(bytes);
  }
  return ended;
}

bool Quarantine::holds_own_user() const noexcept {
  return std::any_of(items_.begin(), items_.end(), [](const auto& item) { return item.own_user; });
}

std::uint64_t Quarantine::bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const QuarantineItem& item : items_) sum += item.bytes;
  return sum;
}

std::string Quarantine::describe() const {
  std::string text;
  for (const QuarantineItem& item : items_) {
    text += fmt::format("{}epoch {}: {} kept by {}", text.empty() ? "" : "; ", item.epoch.value,
                        format_size(item.bytes), item.holder);
  }
  return text;
}

}  // namespace kvferry::ipc::lease
