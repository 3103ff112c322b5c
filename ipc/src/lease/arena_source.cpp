// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/arena_source.hpp"

#include <exception>
#include <utility>

namespace kvferry::ipc::lease {
namespace {

/// What a call threw, as an error.
Error thrown_by(std::string_view call, Epoch epoch) {
  try {
    throw;
  } catch (const Exception& exception) {
    Error error = exception.error();
    error.message = fmt::format("{} of epoch {} threw: {}", call, epoch.value, error.message);
    return error;
  } catch (const std::exception& exception) {
    return KVFERRY_ERROR(kSystem, "{} of epoch {} threw: {}", call, epoch.value, exception.what());
  } catch (...) {
    return KVFERRY_ERROR(kSystem, "{} of epoch {} threw something that is no exception", call,
                         epoch.value);
  }
}

Status check_region(const std::string& name,
                    const RegionRequest& wanted,
                    const RegionMemory& given) {
  if (given.base.address == 0 || given.base.address % kRegionAlignment != 0) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: base {:#x} is {}; align it to {} bytes", name,
                         given.base.address, given.base.address == 0 ? "null" : "misaligned",
                         kRegionAlignment);
  }
  if (given.block_bytes != wanted.block_bytes) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: the engine's blocks have {} bytes, the geometry's {}; register it "
                         "with the data type, heads and tokens per block that the engine uses",
                         name, given.block_bytes, wanted.block_bytes);
  }
  if (given.block_stride < given.block_bytes) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: blocks of {} bytes are {} bytes apart; give a stride of at least "
                         "the block's bytes",
                         name, given.block_bytes, given.block_stride);
  }
  std::uint64_t needed = 0;
  if (__builtin_mul_overflow(wanted.block_count - 1ULL, given.block_stride, &needed) ||
      __builtin_add_overflow(needed, given.block_bytes, &needed) || needed > kMaxArenaBytes ||
      needed > given.size_bytes) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} blocks of {} bytes, {} apart, do not fit its {} bytes; allocate "
                         "all {} blocks, or register fewer",
                         name, wanted.block_count, given.block_bytes, given.block_stride,
                         given.size_bytes, wanted.block_count);
  }
  return ok();
}

}  // namespace

ArenaRequest make_request(Epoch epoch, const ArenaLayout& plan) {
  ArenaRequest request;
  request.epoch = epoch;
  request.order = plan.order;
  for (const Region& region : plan.regions) {
    request.regions.push_back({region.kind, region.layer, region.group, region.replicated,
                               region.block_bytes, plan.groups[region.group.value].block_count});
  }
  return request;
}

Result<std::vector<RegionMemory>> call_allocate(ArenaSource& source,
                                                const ArenaRequest& request) noexcept {
  try {
    return source.allocate(request);
  } catch (...) {
    return thrown_by("allocate()", request.epoch);
  }
}

Status call_release(ArenaSource& source, Epoch epoch) noexcept {
  try {
    return source.release(epoch);
  } catch (...) {
    return thrown_by("release()", epoch);
  }
}

std::string region_name(const ArenaRequest& request, std::size_t index) {
  const RegionRequest& region = request.regions[index];
  return fmt::format("region {} ({} of layer {} in group {})", index, to_string(region.kind),
                     region.layer, region.group.value);
}

Status check_regions(const ArenaRequest& request, const std::vector<RegionMemory>& regions) {
  if (regions.size() != request.regions.size()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "the engine gave {} regions, the geometry has {}; give one for each "
                         "requested region, in that order",
                         regions.size(), request.regions.size());
  }
  for (std::size_t i = 0; i < regions.size(); ++i) {
    KVFERRY_TRY(check_region(region_name(request, i), request.regions[i], regions[i]));
  }
  return ok();
}

}  // namespace kvferry::ipc::lease
