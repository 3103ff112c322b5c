// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::ipc {

struct DevicePtr;
class Stream;

/// How a device is reached by broadcasts of the engine's other ranks.
struct BroadcastPort {
  /// "nccl 2.28.9", "host": only devices with the same one reach each other.
  std::string transport;
  /// Which device that is: of a group, each rank has another one.
  std::string device;
  /// Of the group that this rank has kept from an earlier broadcast; zero for none. What all ranks
  /// have kept is used again.
  Digest group{};
  template <typename V> void visit(V& v) { v(transport, device, group); }
};

/// What the ranks of a group find each other by. For one group, and not for others to know: whoever
/// has it can take a place in the group.
using BroadcastId = std::vector<std::uint8_t>;
/// A group's name for those who are not to join it.
[[nodiscard]] inline Digest group_name(const BroadcastId& id) {
  return Digest::hash(id.data(), id.size());
}
/// Longer than any.
inline constexpr std::size_t kMaxBroadcastId = 256;

/// Where the ranks of a group meet, at rank 0. Ranks that come after its end find nobody, with NCCL
/// until their deadline: a thread and a listening socket that it has for a group end only when all
/// ranks have come. So open one only when all ranks are known to be there.
class BroadcastRoot {
 public:
  BroadcastRoot() = default;
  BroadcastRoot(const BroadcastRoot&) = delete;
  BroadcastRoot& operator=(const BroadcastRoot&) = delete;
  virtual ~BroadcastRoot() = default;
  [[nodiscard]] virtual const BroadcastId& id() const noexcept = 0;
};

/// A rank's place in a group. root: null but at rank 0, which has made the id.
struct BroadcastSeat {
  BroadcastId id;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  const BroadcastRoot* root = nullptr;
};

/// Until when something is waited for, and whether somebody has called it off.
struct BroadcastWait {
  Deadline deadline;
  const std::atomic<bool>& cancelled;
};

/// One rank's end of a group that rank 0 sends to. Whatever fails at any rank (its process dies, it
/// leaves early, a device fails) fails the group: it is of no use then but to be destroyed.
/// One that has not failed serves for any number of broadcasts.
/// @threading one at a time. @lifetime the destructor ends what of it is under way, here and at the
/// other ranks, without waiting for them; streams that it was given to work outlive it, and so does
/// the memory, until the streams have been seen to end.
class BroadcastGroup {
 public:
  BroadcastGroup() = default;
  BroadcastGroup(const BroadcastGroup&) = delete;
  BroadcastGroup& operator=(const BroadcastGroup&) = delete;
  virtual ~BroadcastGroup() = default;

  /// Enqueues that rank 0's bytes come into this rank's memory. All ranks enqueue the same sizes in
  /// the same order. May wait for the others, by the deadline. A stream of another backend is
  /// kInvalidArgument.
  [[nodiscard]] virtual Status broadcast(Stream& stream,
                                         DevicePtr memory,
                                         std::uint64_t size_bytes,
                                         const BroadcastWait& wait) = 0;
  /// What has gone wrong so far, as far as this rank can tell: a rank that hangs is not told from
  /// one that is slow. For those who wait for the stream; what it has brought is good only if this
  /// is still ok() when the stream has ended.
  [[nodiscard]] virtual Status check() = 0;
};

}  // namespace kvferry::ipc
