// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/broadcast.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// Where new weights come from.
enum class WeightsFrom : std::uint8_t {
  kDisk = 1,  ///< A file that every rank reads its part of; location: its path.
  /// Messages that hold a safetensors image piece by piece; location: in an order, the upload that
  /// they belong to; for WeightsUser, the path of a file in memory that holds all of them.
  kTensors,
  /// Device memory that another process of this machine lends (WeightsExporter); location: in an
  /// order, the lender's name, in which {rank} stands for the rank's number; for WeightsUser, the
  /// path of the lender's socket (WeightsImport).
  kIpc,
  /// A file that rank 0 alone reads and hands to the others; location: in an order, its path. Where
  /// each rank has a device of its own that reaches the others, a broadcast between them
  /// (WeightsUser::prepare_broadcast); else messages, and for WeightsUser the path of a file that
  /// holds all of it (kDisk).
  kDistributed
};
constexpr std::uint64_t wire_max(WeightsFrom) {
  return static_cast<std::uint64_t>(WeightsFrom::kDistributed);
}
/// "disk", "tensor", "ipc", "distributed".
[[nodiscard]] std::string_view to_string(WeightsFrom from) noexcept;

struct WeightsSource {
  WeightsFrom from = WeightsFrom::kDisk;
  std::string location;
  template <typename V> void visit(V& v) { v(from, location); }
};
/// kInvalidArgument for a location that no such source can have.
[[nodiscard]] Status check_source(const WeightsSource& source);
/// The lender's name for a rank: its number in place of {rank}.
[[nodiscard]] std::string lender_of(std::string_view location, std::uint32_t rank);

/// A worker's weights, as updates reach them: new ones are prepared on every rank beside those in
/// use, and committed on every rank when all have them, or abandoned on every rank.
/// @threading a thread of its own, one call at a time, but for cancel(). @lifetime outlives the
/// worker's registration.
class WeightsUser {
 public:
  WeightsUser() = default;
  WeightsUser(const WeightsUser&) = delete;
  WeightsUser& operator=(const WeightsUser&) = delete;
  virtual ~WeightsUser() = default;

  /// Gets everything that commit() needs and checks it, which may take long. The weights in use
  /// stay as they are, whatever happens. Returns this rank's bytes.
  [[nodiscard]] virtual Result<std::uint64_t> prepare(const WeightsSource& source,
                                                      Deadline deadline) = 0;
  /// How this rank is reached by a broadcast of weights. An error says why it is not: messages
  /// bring them then, and prepare() finds them in a file. The default is none.
  [[nodiscard]] virtual Result<BroadcastPort> broadcast_port();
  /// At rank 0, of a broadcast to all ranks: opens the file and a group for it, or with `again` the
  /// one that all have kept (BroadcastPort::group). Returns the group's id; the next
  /// prepare_broadcast() takes both, abandon() lets the file go.
  [[nodiscard]] virtual Result<BroadcastId> open_broadcast(const std::string& file, bool again);
  /// prepare() of what rank 0 broadcasts, called on all ranks at the same time. When one of them
  /// fails, the others are told to cancel(). Who comes to its end may keep the group.
  [[nodiscard]] virtual Result<std::uint64_t> prepare_broadcast(const BroadcastId& id,
                                                                Deadline deadline);
  /// Puts the prepared weights into the place of those in use. Nothing computes meanwhile.
  [[nodiscard]] virtual Status commit(Deadline deadline) = 0;
  /// Lets go of what is prepared, if anything is.
  virtual void abandon() = 0;
  /// A prepare() that runs or comes ends soon, with kCancelled, until abandon() is called. Any
  /// thread.
  virtual void cancel() noexcept = 0;
};

}  // namespace kvferry::ipc
