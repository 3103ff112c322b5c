// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/arena.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "lease/arena_source.hpp"
#include "model/packed_order.hpp"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

bool in_set(const Region& region, RegionSet set) noexcept {
  switch (set) {
    case RegionSet::kAll: return true;
    case RegionSet::kSharded: return !region.replicated;
    case RegionSet::kReplicated: return region.replicated;
  }
  return false;
}

/// The regions of one group: they lie next to each other, group by group.
std::span<const Region> regions_of(const ArenaLayout& layout, GroupId group) {
  KVFERRY_CHECK(
      group.value < layout.groups.size(),
      fmt::format("arena has {} groups, asked for group {}", layout.groups.size(), group.value));
  const auto is_own = [group](const Region& region) { return region.group == group; };
  const auto begin = std::find_if(layout.regions.begin(), layout.regions.end(), is_own);
  const auto end = std::find_if_not(begin, layout.regions.end(), is_own);
  return {begin, end};
}

/// Group, rank (0 for what is the same on every rank) and place in the group, each in bits of its
/// own: no two regions that hold different bytes get the same salt.
std::uint64_t fill_salt(GroupId group, std::size_t place, bool replicated, Rank rank) noexcept {
  const std::uint64_t shard = replicated ? 0 : std::uint64_t{rank.value} + 1;
  return (std::uint64_t{group.value} << 48U) | (shard << 32U) | (place + 1);
}

/// As much as the segment can ever need: its share of an arena that takes the whole device.
/// Addresses cost nothing, and an arena that grows at a re-init keeps them.
std::uint64_t roomy_bytes(Device& device, const ArenaLayout& layout, std::uint64_t size_bytes) {
  const auto memory = device.memory_info();
  const std::uint64_t arena_bytes = layout.total_bytes();
  if (!memory || arena_bytes == 0 || memory->total_bytes <= arena_bytes) return size_bytes;
  const double share = static_cast<double>(size_bytes) / static_cast<double>(arena_bytes);
  return std::max(size_bytes,
                  static_cast<std::uint64_t>(share * static_cast<double>(memory->total_bytes)));
}

/// The range that segment `index` is mapped into; null when addresses need not stay.
Result<AddressRange*> range_for(Device& device,
                                AddressRanges* ranges,
                                HandleKind kind,
                                const ArenaLayout& layout,
                                std::size_t index,
                                std::uint64_t size_bytes) {
  if (ranges == nullptr || kind != HandleKind::kVmm) return nullptr;
  if (ranges->size() <= index) ranges->resize(index + 1);
  std::unique_ptr<AddressRange>& range = (*ranges)[index];
  if (range && range->size_bytes() >= size_bytes) return range.get();
  range.reset();
  const std::uint64_t unit = std::max<std::uint64_t>(device.allocation_granularity(), 1);
  const auto rounded = [unit](std::uint64_t bytes) { return (bytes + unit - 1) / unit * unit; };
  auto roomy = device.reserve(rounded(roomy_bytes(device, layout, size_bytes)));
  if (roomy) {
    range = std::move(roomy).value();
    return range.get();
  }
  // A process with limited address space gets what this epoch needs.
  KVFERRY_ASSIGN(range, device.reserve(rounded(size_bytes)));
  return range.get();
}

Status check_memory(const DeviceMemory& memory, std::size_t index, std::uint64_t size_bytes) {
  if (memory.size_bytes() >= size_bytes) return ok();
  return KVFERRY_ERROR(kProtocol, "arena segment {} has {} bytes, the layout needs {}", index,
                       memory.size_bytes(), size_bytes);
}

/// The first of several failures, with the others in its message.
class Failures {
 public:
  void add(std::string_view what, const Status& status) {
    if (status) return;
    Error error = status.error();
    error.message = fmt::format("{}: {}", what, error.message);
    if (!first_) {
      first_ = std::move(error);
    } else {
      first_->message += fmt::format("; {}", error.to_string());
    }
  }
  [[nodiscard]] Status status(std::string_view whose) {
    if (!first_) return ok();
    first_->message = fmt::format("{}: {}", whose, first_->message);
    return std::move(*first_);
  }

 private:
  std::optional<Error> first_;
};

/// Every one of them, whatever the others say; afterwards the list is empty.
void release_all(std::vector<std::unique_ptr<DeviceMemory>>& segments, Failures& failures) {
  for (std::size_t i = 0; i < segments.size(); ++i) {
    failures.add(fmt::format("segment {} of {}", i, segments.size()), segments[i]->release());
  }
  segments.clear();
}

/// Undoes what was done before a failure; the failure is what is reported.
Error give_up(std::vector<std::unique_ptr<DeviceMemory>>& segments, Epoch epoch, Error cause) {
  Failures failures;
  release_all(segments, failures);
  if (const Status released = failures.status("after a failure"); !released) {
    log_error("arena epoch {}: {}", epoch.value, released.error().to_string());
  }
  cause.message = fmt::format("arena epoch {}: {}", epoch.value, cause.message);
  return cause;
}

}  // namespace

Arena::Arena(Epoch epoch, ArenaLayout layout, std::vector<std::unique_ptr<DeviceMemory>> segments)
    : Arena(epoch, std::move(layout), {}, std::move(segments)) {}

Arena::Arena(Epoch epoch,
             ArenaLayout layout,
             std::vector<std::unique_ptr<BorrowedMemory>> borrowed,
             std::vector<std::unique_ptr<DeviceMemory>> segments)
    : epoch_(epoch),
      layout_(std::move(layout)),
      borrowed_(std::move(borrowed)),
      segments_(std::move(segments)) {
  KVFERRY_CHECK(borrowed_.size() + segments_.size() == layout_.segment_bytes.size(),
                fmt::format("arena epoch {}: {} segments, the layout has {}", epoch_.value,
                            borrowed_.size() + segments_.size(), layout_.segment_bytes.size()));
}

Arena::Arena(Arena&& other) noexcept
    : epoch_(other.epoch_),
      layout_(std::move(other.layout_)),
      source_(std::exchange(other.source_, nullptr)),
      borrowed_(std::move(other.borrowed_)),
      segments_(std::move(other.segments_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  release_and_log();
  epoch_ = other.epoch_;
  layout_ = std::move(other.layout_);
  source_ = std::exchange(other.source_, nullptr);
  borrowed_ = std::move(other.borrowed_);
  segments_ = std::move(other.segments_);
  return *this;
}

Arena::~Arena() { release_and_log(); }

void Arena::release_and_log() noexcept {
  if (!mapped()) return;
  const Status status = release();
  if (!status) log_error("{}", status.error().to_string());
}

Result<Arena> Arena::allocate(Device& device,
                              Epoch epoch,
                              const ArenaLayout& layout,
                              HandleKind kind,
                              AddressRanges* ranges) {
  std::vector<std::unique_ptr<DeviceMemory>> segments;
  segments.reserve(layout.segment_bytes.size());
  for (std::size_t i = 0; i < layout.segment_bytes.size(); ++i) {
    const std::uint64_t bytes = layout.segment_bytes[i];
    const Result<AddressRange*> at = range_for(device, ranges, kind, layout, i, bytes);
    if (!at) return give_up(segments, epoch, at.error());
    Result<std::unique_ptr<DeviceMemory>> memory = device.allocate(bytes, kind, *at);
    if (!memory) return give_up(segments, epoch, memory.error());
    segments.push_back(*std::move(memory));
  }
  return Arena(epoch, layout, std::move(segments));
}

Result<Arena> Arena::import(Device& device,
                            Epoch epoch,
                            const ArenaLayout& layout,
                            std::vector<ExportedHandle> handles,
                            AddressRanges* ranges) {
  if (handles.size() != layout.segment_bytes.size()) {
    return KVFERRY_ERROR(kProtocol, "arena epoch {}: {} handles came for {} segments", epoch.value,
                         handles.size(), layout.segment_bytes.size());
  }
  std::vector<std::unique_ptr<DeviceMemory>> segments;
  segments.reserve(handles.size());
  for (std::size_t i = 0; i < handles.size(); ++i) {
    const std::uint64_t bytes = layout.segment_bytes[i];
    const HandleKind kind = handles[i].kind;
    if (handles[i].size_bytes < bytes || kind != handles.front().kind) {
      return give_up(
          segments, epoch,
          KVFERRY_ERROR(kProtocol, "handle {} is {} with {} bytes, expected {} with {} or more", i,
                        to_string(kind), handles[i].size_bytes, to_string(handles.front().kind),
                        bytes));
    }
    // The whole allocation is mapped, which is the layout's size rounded up by its owner.
    const Result<AddressRange*> at =
        range_for(device, ranges, kind, layout, i, handles[i].size_bytes);
    if (!at) return give_up(segments, epoch, at.error());
    Result<std::unique_ptr<DeviceMemory>> memory = device.import(std::move(handles[i]), *at);
    if (!memory) return give_up(segments, epoch, memory.error());
    segments.push_back(*std::move(memory));
    const Status fits = check_memory(*segments.back(), i, bytes);
    if (!fits) return give_up(segments, epoch, fits.error());
  }
  return Arena(epoch, layout, std::move(segments));
}

const DeviceMemory& Arena::memory(std::size_t segment) const {
  if (segment < borrowed_.size()) return *borrowed_[segment];
  return *segments_[segment - borrowed_.size()];
}

DevicePtr Arena::segment(std::uint32_t index) const {
  const std::size_t count = mapped() ? borrowed_.size() + segments_.size() : 0;
  KVFERRY_CHECK(index < count, fmt::format("arena epoch {}: segment {} of {} mapped ones",
                                           epoch_.value, index, count));
  return memory(index).address();
}

DevicePtr Arena::staging_slot(std::uint32_t slot) const {
  KVFERRY_CHECK(slot < layout_.staging.slots,
                fmt::format("arena epoch {}: staging slot {} of {}", epoch_.value, slot,
                            layout_.staging.slots));
  return segment(layout_.staging.segment) +
         (layout_.staging.offset + slot * layout_.staging.slot_bytes);
}

std::vector<kernels::StridedRegion> Arena::strided(GroupId group, RegionSet set, Rank rank) const {
  const std::span<const Region> regions = regions_of(layout_, group);
  std::vector<kernels::StridedRegion> result;
  std::uint64_t packed_offset = 0;
  for (const std::size_t i : model::packed_order(regions)) {
    const Region& region = regions[i];
    if (!in_set(region, set)) continue;
    kernels::StridedRegion strided;
    strided.base = static_cast<unsigned char*>((segment(region.segment) + region.offset).raw());
    strided.block_stride = region.block_stride;
    strided.block_bytes = region.block_bytes;
    strided.packed_offset = packed_offset;
    strided.salt = fill_salt(group, i, region.replicated, rank);
    result.push_back(strided);
    packed_offset += region.block_bytes;
  }
  return result;
}

std::vector<std::uint32_t> Arena::layers(GroupId group, RegionSet set) const {
  const std::span<const Region> regions = regions_of(layout_, group);
  std::vector<std::uint32_t> result;
  for (const std::size_t i : model::packed_order(regions)) {
    if (in_set(regions[i], set)) result.push_back(regions[i].layer);
  }
  return result;
}

std::uint64_t Arena::packed_bytes(GroupId group, RegionSet set) const {
  std::uint64_t sum = 0;
  for (const Region& region : regions_of(layout_, group)) {
    if (in_set(region, set)) sum += region.block_bytes;
  }
  return sum;
}

Result<std::vector<ExportedHandle>> Arena::export_handles() const {
  std::vector<ExportedHandle> handles;
  handles.reserve(borrowed_.size() + segments_.size());
  const auto add = [&handles](DeviceMemory& memory) -> Status {
    KVFERRY_ASSIGN(ExportedHandle handle, memory.export_handle());
    handles.push_back(std::move(handle));
    return ok();
  };
  for (const auto& memory : borrowed_) KVFERRY_TRY(add(*memory));
  for (const auto& memory : segments_) KVFERRY_TRY(add(*memory));
  return handles;
}

Status Arena::release() {
  Failures failures;
  release_all(segments_, failures);
  if (source_ != nullptr) {
    // Ours first: memory that we still hold would not go back to the driver.
    for (const auto& memory : borrowed_) failures.add("borrowed allocation", memory->release());
    failures.add("the engine", lease::call_release(*std::exchange(source_, nullptr), epoch_));
  }
  return failures.status(fmt::format("arena epoch {}", epoch_.value));
}

}  // namespace kvferry::ipc
