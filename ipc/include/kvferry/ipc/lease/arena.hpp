// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena_source.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvferry::ipc {

/// Which regions of a group take part in a transfer: a store of the replicated part is done by one
/// rank only; packed order is replicated regions first, then sharded ones, each in layout order.
enum class RegionSet : std::uint8_t { kAll = 1, kSharded, kReplicated };

/// Address ranges that outlive epochs, so that VMM memory comes back at the same addresses.
using AddressRanges = std::vector<std::unique_ptr<AddressRange>>;

/// The mapped arena of one epoch in one process, for owner and attacher alike: segments, layout and
/// pointer lists. release() is the one free function for both roles: after it nothing of the epoch
/// is left in this object, whatever the role and whatever failed on the way. An owner's arena is
/// allocated here or borrowed from an engine.
/// @threading one at a time; const members any.
class Arena {
 public:
  Arena(Epoch epoch, ArenaLayout layout, std::vector<std::unique_ptr<DeviceMemory>> segments);
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// Reserves (or reuses) ranges when kind is kVmm and ranges is given.
  [[nodiscard]] static Result<Arena> allocate(Device& device,
                                              Epoch epoch,
                                              const ArenaLayout& layout,
                                              HandleKind kind,
                                              AddressRanges* ranges);
  /// Takes the regions of an engine's own memory, asked for as the plan says, and allocates the
  /// plan's staging ring beside them. Each allocation that a region lies in becomes one segment,
  /// however many regions share it. Errors name the region, both values and the remedy; what the
  /// source had allocated is released again before they are returned.
  [[nodiscard]] static Result<Arena> borrow(
      Device& device, Epoch epoch, const ArenaLayout& plan, HandleKind kind, ArenaSource& source);
  /// Handles in segment order. A failure part way closes what was imported.
  [[nodiscard]] static Result<Arena> import(Device& device,
                                            Epoch epoch,
                                            const ArenaLayout& layout,
                                            std::vector<ExportedHandle> handles,
                                            AddressRanges* ranges);

  [[nodiscard]] Epoch epoch() const noexcept { return epoch_; }
  [[nodiscard]] const ArenaLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] bool mapped() const noexcept { return !segments_.empty() || source_ != nullptr; }
  /// Its regions are an engine's; true after release(), too.
  [[nodiscard]] bool is_borrowed() const noexcept { return !borrowed_.empty(); }
  [[nodiscard]] std::uint64_t total_bytes() const { return layout_.total_bytes(); }
  [[nodiscard]] DevicePtr segment(std::uint32_t index) const;
  [[nodiscard]] DevicePtr staging_slot(std::uint32_t slot) const;
  /// Strided regions of a group with packed offsets and fill salts. salt depends on the region's
  /// place in the group and, for sharded regions, on the rank.
  [[nodiscard]] std::vector<kernels::StridedRegion> strided(GroupId group,
                                                            RegionSet set,
                                                            Rank rank) const;
  /// The layer of each of those.
  [[nodiscard]] std::vector<std::uint32_t> layers(GroupId group, RegionSet set) const;
  [[nodiscard]] std::uint64_t packed_bytes(GroupId group, RegionSet set) const;
  [[nodiscard]] Result<std::vector<ExportedHandle>> export_handles() const;

  /// Other processes that map a segment, where the backend can tell
  /// (DeviceMemory::mapped_elsewhere).
  [[nodiscard]] Result<std::vector<pid_t>> mapped_elsewhere() const;

  /// One trace per segment; none at all when the backend cannot tell about one of
  /// them, or when regions are borrowed.
  [[nodiscard]] std::vector<std::unique_ptr<MemoryTrace>> traces() const;

  /// Releases every segment, errors collected and never short-circuited, and then asks the source
  /// of a borrowed arena to free the regions. Pointers and tables made from it are void; layout()
  /// stays readable. A second call is ok and does nothing.
  [[nodiscard]] Status release();

  /// The allocations behind a borrowed arena's regions, released or not; nothing for others.
  [[nodiscard]] std::span<const std::unique_ptr<BorrowedMemory>> borrowed() const noexcept {
    return borrowed_;
  }
  /// Whether both are borrowed and not released, and share a byte of a block: "" when not, else
  /// both regions in words.
  [[nodiscard]] std::string overlap_with(const Arena& other) const;

 private:
  Arena(Epoch epoch,
        ArenaLayout layout,
        std::vector<std::unique_ptr<BorrowedMemory>> borrowed,
        std::vector<std::unique_ptr<DeviceMemory>> segments);
  static Result<Arena> take_regions(Device& device,
                                    const ArenaRequest& request,
                                    const std::vector<RegionMemory>& regions,
                                    const ArenaLayout& plan,
                                    HandleKind kind);
  [[nodiscard]] const DeviceMemory& memory(std::size_t segment) const;
  void release_and_log() noexcept;

  Epoch epoch_;
  ArenaLayout layout_;
  ArenaSource* source_ = nullptr;  ///< Of a borrowed arena that was not released.
  /// The first segments of a borrowed arena. Kept after the release, to be looked at.
  std::vector<std::unique_ptr<BorrowedMemory>> borrowed_;
  std::vector<std::unique_ptr<DeviceMemory>> segments_;  ///< Those that follow: ours.
};

/// What the memory of a mapped epoch holds.
enum class ArenaContents : std::uint8_t {
  kUndefined = 1,  ///< Whatever the driver gave out, or what a zeroing that did not end left.
  kPrepared,       ///< Zeroed before, and what was written since: not to be zeroed again.
};

/// What uses a mapped arena in a process: the mover's transfer engine, the worker's runner and
/// staging agent. Called by the lease thread, one call at a time, in both roles.
class ArenaUser {
 public:
  virtual ~ArenaUser() = default;
  /// The epoch is mapped here; may be used from now on. A worker zeroes undefined contents, in
  /// either role, and has observed the end of it when this returns ok. An error detaches (attacher)
  /// or frees (owner) again. After an error quiesce() and on_unmapped() are called as well, so work
  /// already begun on the arena has ended.
  [[nodiscard]] virtual Status on_mapped(SessionId session,
                                         Arena& arena,
                                         ArenaContents contents) = 0;
  /// Stop admitting, end queued work as kRevoked, let what is in flight finish: on ok nothing of
  /// this process touches the arena any more. Must return by the deadline.
  [[nodiscard]] virtual Status quiesce(Epoch epoch, Deadline deadline) = 0;
  /// Drop every pointer of the epoch; called before the memory is unmapped, after quiesce.
  virtual void on_unmapped(Epoch epoch) = 0;
  /// The epoch's memory is gone here (freed, unmapped, or in quarantine), and nobody has been told
  /// yet: what this process keeps beside the arena goes back now, so that whoever sees the epoch
  /// ended finds the device as empty as it gets.
  virtual void on_freed(Epoch /*epoch*/) {}
};

}  // namespace kvferry::ipc
