// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "lease/return_check.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::ipc::lease {

/// Memory that could not be proven let go. What is neither mapped nor given back is here: there is
/// no third place.
struct QuarantineItem {
  Epoch epoch;
  std::uint64_t bytes = 0;
  std::string holder;         ///< Who keeps it, in words.
  AddressRanges ranges = {};  ///< Those that arena is mapped into, if any: they outlive it.
  /// Kept until nobody maps it: a legacy allocation, or what an engine lent; of the latter also
  /// what is left after its release, until that is gone.
  std::optional<Arena> arena = std::nullopt;
  std::string failure = {};  ///< What an engine's release said when it failed.
  bool own_user = false;     ///< Our own user did not let go of it: asked again before the free.
  bool settle = false;       ///< Gone only once check says so.
  ReturnCheck check = {};    ///< Of the last release; free memory counted with our arena.
};

/// "12, 13": process ids.
[[nodiscard]] std::string describe(const std::vector<pid_t>& pids);

/// @threading the lease thread.
class Quarantine {
 public:
  /// freeing: called just before an epoch's memory is freed.
  Quarantine(Device& device, ArenaUser& user, std::function<void(Epoch)> freeing)
      : device_(device), user_(user), freeing_(std::move(freeing)) {}
  Quarantine(const Quarantine&) = delete;
  Quarantine& operator=(const Quarantine&) = delete;
  ~Quarantine();

  void add(QuarantineItem item);
  /// Frees what may be freed. living: a lease of this epoch lives; died: one of them ended by a
  /// death; mapped: the arena of now, which the driver counts as used; null for none. Returns the
  /// epochs whose quarantine ended.
  std::vector<Epoch> reap(const std::function<bool(Epoch)>& living,
                          const std::function<bool(Epoch)>& died,
                          const Arena* mapped);
  /// Our own user still works on an earlier epoch, and it uses one at a time.
  [[nodiscard]] bool holds_own_user() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return items_.empty(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept;
  [[nodiscard]] std::string describe() const;
  /// A quarantined epoch that was not released has regions of an engine in the allocation.
  [[nodiscard]] bool lends(AllocationId id) const;
  /// Two regions in words that share memory, one of them of such an epoch; "" when there are none.
  [[nodiscard]] std::string overlap_with(const Arena& arena) const;

 private:
  /// True when the item is over.
  bool try_end(QuarantineItem& item, const Arena* mapped);
  /// Frees the memory unless somebody maps it; true when done.
  bool try_release(QuarantineItem& item, std::uint64_t arena_bytes);

  Device& device_;
  ArenaUser& user_;
  std::function<void(Epoch)> freeing_;
  std::vector<QuarantineItem> items_;
};

}  // namespace kvferry::ipc::lease
