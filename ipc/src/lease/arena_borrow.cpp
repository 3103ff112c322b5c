// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "lease/arena_source.hpp"
#include "model/arena_places.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

using Borrowed = std::vector<std::unique_ptr<BorrowedMemory>>;

std::string_view remedy_for(HandleKind kind) noexcept {
  switch (kind) {
    case HandleKind::kLegacy: return "start worker and mover with --handles legacy";
    case HandleKind::kVmm: return "start worker and mover with --handles vmm";
  }
  return "";
}

/// The place in the list of the allocation that the region lies in, borrowed when it is new.
Result<std::uint32_t> find_allocation(
    Device& device, Borrowed& borrowed, const std::string& name, DevicePtr base, HandleKind kind) {
  const auto known = std::find_if(borrowed.begin(), borrowed.end(), [base](const auto& memory) {
    return base >= memory->address() && base < memory->address() + memory->size_bytes();
  });
  if (known != borrowed.end()) return static_cast<std::uint32_t>(known - borrowed.begin());
  auto memory = device.borrow(base);
  if (!memory) {
    Error error = std::move(memory).error();
    error.message = fmt::format("{}: {}", name, error.message);
    return error;
  }
  if ((*memory)->kind() != kind) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: its allocation can be shared by {} handles only, this rank uses {}; "
                         "{}, or allocate it otherwise",
                         name, to_string((*memory)->kind()), to_string(kind),
                         remedy_for((*memory)->kind()));
  }
  borrowed.push_back(*std::move(memory));
  return static_cast<std::uint32_t>(borrowed.size() - 1);
}

/// Offset of the region in its allocation, which must hold all its blocks.
Result<std::uint64_t> place_in(const BorrowedMemory& memory,
                               const std::string& name,
                               const RegionMemory& given,
                               std::uint32_t block_count) {
  const std::uint64_t offset = given.base.address - memory.address().address;
  const std::uint64_t needed = (block_count - 1ULL) * given.block_stride + given.block_bytes;
  if (needed <= memory.size_bytes() - offset) return offset;
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: its blocks take {} bytes from {:#x}, the allocation there ends after "
                       "{}; allocate a region in one piece (of PyTorch: without "
                       "expandable_segments)",
                       name, needed, given.base.address, memory.size_bytes() - offset);
}

struct Span {
  std::uintptr_t begin = 0;
  std::uint64_t size_bytes = 0;
};

Span span_of(const Arena& arena, const Region& region) {
  const std::uint64_t count = arena.layout().groups[region.group.value].block_count;
  return {(arena.segment(region.segment) + region.offset).address,
          (count - 1) * region.block_stride + region.block_bytes};
}

}  // namespace

Result<Arena> Arena::take_regions(Device& device,
                                  const ArenaRequest& request,
                                  const std::vector<RegionMemory>& regions,
                                  const ArenaLayout& plan,
                                  HandleKind kind) {
  KVFERRY_TRY(lease::check_regions(request, regions));
  ArenaLayout layout;
  layout.order = plan.order;
  layout.groups = plan.groups;
  layout.fingerprint = plan.fingerprint;
  Borrowed borrowed;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const std::string name = lease::region_name(request, i);
    Region region = plan.regions[i];
    KVFERRY_ASSIGN(region.segment, find_allocation(device, borrowed, name, regions[i].base, kind));
    KVFERRY_ASSIGN(region.offset, place_in(*borrowed[region.segment], name, regions[i],
                                           request.regions[i].block_count));
    region.block_stride = regions[i].block_stride;
    layout.regions.push_back(region);
  }
  for (const auto& memory : borrowed) layout.segment_bytes.push_back(memory->size_bytes());
  std::vector<std::unique_ptr<DeviceMemory>> own;
  if (plan.staging.slots > 0) {
    layout.staging = plan.staging;
    layout.staging.segment = static_cast<std::uint32_t>(borrowed.size());
    layout.staging.offset = 0;
    layout.segment_bytes.push_back(plan.staging.slots * plan.staging.slot_bytes);
  }
  if (Status places = model::check_places(layout); !places) {
    // The same rules as for a layout from the wire, but these numbers came from the engine.
    Error error = std::move(places).error();
    error.code = ErrorCode::kInvalidArgument;
    error.message += "; segments are the engine's allocations, in the order of its regions";
    return error;
  }
  if (plan.staging.slots > 0) {
    KVFERRY_ASSIGN(auto ring, device.allocate(layout.segment_bytes.back(), kind, nullptr));
    own.push_back(std::move(ring));
  }
  return Arena(request.epoch, std::move(layout), std::move(borrowed), std::move(own));
}

Result<Arena> Arena::borrow(
    Device& device, Epoch epoch, const ArenaLayout& plan, HandleKind kind, ArenaSource& source) {
  const ArenaRequest request = lease::make_request(epoch, plan);
  auto regions = lease::call_allocate(source, request);
  if (!regions) {
    Error error = std::move(regions).error();
    error.message =
        fmt::format("the engine allocated nothing for epoch {}: {}", epoch.value, error.message);
    return error;
  }
  // What it borrowed and allocated itself is gone again when this has failed.
  auto arena = take_regions(device, request, *regions, plan, kind);
  if (!arena) {
    Error error = std::move(arena).error();
    error.message = fmt::format("regions of epoch {}: {}", epoch.value, error.message);
    if (const Status released = lease::call_release(source, epoch); !released) {
      error.message +=
          fmt::format("; and the engine did not release them: {}", released.error().to_string());
    }
    return error;
  }
  arena->source_ = &source;
  return arena;
}

std::string Arena::overlap_with(const Arena& other) const {
  if (source_ == nullptr || other.source_ == nullptr) return {};
  for (std::size_t i = 0; i < layout_.regions.size(); ++i) {
    const Span ours = span_of(*this, layout_.regions[i]);
    for (std::size_t j = 0; j < other.layout_.regions.size(); ++j) {
      const Span theirs = span_of(other, other.layout_.regions[j]);
      if (ours.begin < theirs.begin + theirs.size_bytes &&
          theirs.begin < ours.begin + ours.size_bytes) {
        return fmt::format("region {} of epoch {} and region {} of epoch {}", i, epoch_.value, j,
                           other.epoch_.value);
      }
    }
  }
  return {};
}

}  // namespace kvferry::ipc
