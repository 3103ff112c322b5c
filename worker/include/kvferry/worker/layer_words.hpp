// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/device/stream_word.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::worker {

using ipc::LayerTicket;

/// The words by which this worker's compute and the transfers of its blocks go in step, layer by
/// layer: a load says which layers are there, and the compute waits for each; the compute says
/// which layers it has written, and a store waits for them. All waits are of the device's streams;
/// no process is asked in between, and no stream ever waits for another process: both sides of a
/// word are streams of this one (the staging agent's and the engine's), and when a transfer fails,
/// or whoever asked for it dies, the agent lets the waiters go and marks the use as failed.
///
/// A word counts layers: n when the layers 0 to n - 1 are there. A use of a slot begins at 0, by
/// whoever comes first of begin() and the transfer. So a graph that was captured with its waits and
/// marks can be launched for any number of uses of its slot, one after another.
///
/// A step with a load, on every rank: begin(ticket), enqueue await_layer() before each layer's
/// first read, or launch the graph that has it, and observe the end; then end(ticket) says whether
/// the blocks held what they should. With a store likewise, with mark_layer() after each layer's
/// last write. Where it does both, follow() ties them. After that, and after the completion of the
/// job, the slot may be used again. Each use that begin() took ends with end(), also when nothing
/// of it was launched: until then no other use has the slot, an engine's that came after this one's
/// death included.
///
/// On CUDA: fewer streams than CUDA_DEVICE_MAX_CONNECTIONS (8 unless set) may wait at a time, one
/// of which is the agent's; and kernels that run while others wait have run, or been loaded, before
/// (docs/adr/0006-layer-words-within-one-process.md). What breaks that ends at its deadline.
/// @threading any. @lifetime the RegisteredWorker outlives all work that waits or marks.
class LayerWords {
 public:
  enum class Use : std::uint8_t { kAwaitsLoad = 1, kIsStored };

  /// What a word has when its use has failed: past every layer.
  static constexpr std::uint32_t kReleased = 0x4000'0000;

  /// Throws Exception when there is no memory for the words.
  explicit LayerWords(ipc::Device& device);
  LayerWords(const LayerWords&) = delete;
  LayerWords& operator=(const LayerWords&) = delete;
  ~LayerWords() = default;

  /// The use begins, unless its transfer has begun it (which waits for 30 s for this). It fails
  /// (kTimeout) when its transfer has not ended at the deadline. kInvalidArgument for a slot that
  /// there is not, kStaleEpoch for a use that is over, kBusy while a step or a transfer of an
  /// earlier use of the slot has not ended, which goes on unharmed: take another slot, or retry. A
  /// use that has failed already is no error here: nothing waits for it, and end() says so.
  /// @param use what the step does: a load fails with the manager that had it; compute that is to
  /// be stored goes on without. Without a manager a load's use fails as it begins
  [[nodiscard]] ipc::Status begin(const LayerTicket& ticket,
                                  ipc::Deadline deadline,
                                  Use use = Use::kAwaitsLoad);
  /// A step computes what is stored of what a load brings: when the load fails the store does
  /// (kCancelled), before anything is let go that waits for the load. Otherwise what was computed
  /// of blocks that never came would be found under the keys of what should have been. Nothing for
  /// a use that is over. @pre both uses have begun.
  void follow(const LayerTicket& store, const LayerTicket& load);
  /// The stream goes on when the layer is there, or when the use has failed.
  [[nodiscard]] ipc::Status await_layer(ipc::Stream& stream,
                                        std::uint32_t slot,
                                        std::uint32_t layer) const;
  /// All work enqueued before in the stream has written the layer. @pre layers are marked in order.
  [[nodiscard]] ipc::Status mark_layer(ipc::Stream& stream,
                                       std::uint32_t slot,
                                       std::uint32_t layer) const;
  /// For streams and graphs that are not kvferry's, by cuStreamWaitValue32(…, layer + 1, GEQ) and
  /// cuStreamWriteValue32(…, layer + 1). @pre slot < ipc::kLayerSlots.
  [[nodiscard]] ipc::StreamWord word(std::uint32_t slot) const noexcept;
  /// The engine has observed the end of the work that waits or marks. Ok, or why the use failed.
  [[nodiscard]] ipc::Status end(const LayerTicket& ticket);
  /// The use will not be what it should: lets go whoever waits for it. Nothing for one that is
  /// over.
  void fail(const LayerTicket& ticket, const ipc::Error& error);

  // ---- for the staging agent ----

  /// A transfer of that use begins; ends with leave(). The use's error when it has failed;
  /// kStaleEpoch, kBusy and kInvalidArgument as begin().
  [[nodiscard]] ipc::Status enter(const LayerTicket& ticket);
  /// Why the use has failed meanwhile, if it has. is_last: no other transfer of the use will come.
  [[nodiscard]] ipc::Status leave(const LayerTicket& ticket, bool is_last);
  void fail_all(const ipc::Error& error);
  /// Those of steps that wait for a load which has not ended, and from now on those of steps that
  /// begin: nobody is left who would move it. A use that its transfer has begun fails when a step
  /// begins it for a load, as long as the transfer has not ended.
  void fail_awaited(const ipc::Error& error);
  /// Loads are moved again: steps that begin a use wait for theirs.
  void serve_awaited();
  /// Fails what is overdue, and lets waiters go once more where late work may have written over it.
  void expire(ipc::TimePoint now);
  /// When expire() has something to do.
  [[nodiscard]] std::optional<ipc::TimePoint> next_look() const;
  /// Called when next_look() may have become sooner; on the caller's thread of begin(), enter() or
  /// fail().
  void on_sooner(std::function<void()> call) { sooner_ = std::move(call); }

 private:
  struct EarlyFailure {
    std::uint64_t use = 0;
    ipc::Error error;
  };
  struct Slot {
    std::uint64_t use = 0;
    bool begun = false;  ///< By a step, which waits or marks until it is over.
    bool over = true;
    bool is_awaited = false;      ///< A step has begun it, for a load.
    bool complete = false;        ///< Its last transfer has ended: nothing is waited for any more.
    std::uint32_t transfers = 0;  ///< Of this use, between enter() and leave().
    std::optional<ipc::TimePoint> deadline;
    std::optional<ipc::Error> failure;
    std::optional<ipc::Error> orphaned;    ///< Why a load of it, which no step awaits yet, fails.
    std::vector<LayerTicket> followers{};  ///< Fail with it.
    std::optional<EarlyFailure> early;     ///< Of a later use, which the slot is not free for yet.
  };

  [[nodiscard]] ipc::Status open(const LayerTicket& ticket);
  void note_early(const LayerTicket& ticket, const ipc::Error& error);
  void fail_slot(std::uint32_t number, const ipc::Error& error);
  void fail_follower(const LayerTicket& store, const ipc::Error& error);

  const std::unique_ptr<ipc::PinnedBuffer> words_;
  std::function<void()> sooner_;
  mutable std::mutex mutex_;  ///< Guards slots_, and the words against a second host writer.
  std::array<Slot, ipc::kLayerSlots> slots_;
  std::optional<ipc::Error> unserved_;  ///< Why no load is moved, while none is.
};

}  // namespace kvferry::worker
