// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Which ways there are to take scattered blocks over the link beside a decode, and what each costs.
// docs/performance.md says what was found.
#include "probes/copy_ways/contents.hpp"
#include "probes/copy_ways/decode.hpp"
#include "probes/copy_ways/measure.hpp"
#include "probes/copy_ways/options.hpp"
#include "probes/copy_ways/report.hpp"
#include "probes/copy_ways/way.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdio>
#include <exception>
#include <regex>
#include <span>
#include <stdexcept>
#include <string>

namespace kvferry::probes {
namespace {

constexpr std::size_t kHostPoolBytes = std::size_t{1} << 30;
/// A slot for each call ahead.
constexpr std::size_t kRingBytes = kCallsAhead * kKernelCallBytes;

nlohmann::json describe_device() {
  cudaDeviceProp properties{};
  int driver = 0;
  KVFERRY_PROBE_CUDA(cudaGetDeviceProperties(&properties, 0));
  KVFERRY_PROBE_CUDA(cudaDriverGetVersion(&driver));
  if (properties.major < 9) {
    throw std::runtime_error(fmt::format("{} has compute capability {}.{}; the probe needs 9.0",
                                         properties.name, properties.major, properties.minor));
  }
  return {{"device", properties.name},
          {"multiprocessors", properties.multiProcessorCount},
          {"driver_cuda_version", driver}};
}

WayResult try_way(const WayKind& kind, const Scene& scene, Measurement& measurement) {
  WayResult result{.name = kind.name, .nothing_beside = {}, .beside_decode = {}, .failure = {}};
  try {
    const std::vector<Lane> lanes = kind.lanes(scene);
    check_contents(lanes, scene.direction);
    result.nothing_beside = measurement.with_nothing_beside(lanes);
    result.beside_decode = measurement.beside_decode(lanes);
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
  return result;
}

/// The run's memory, but for the arena.
struct Memory {
  PinnedMemory host_pool = allocate_pinned(kHostPoolBytes);
  DeviceMemory ring = allocate_device(kRingBytes);
};

void try_ways(const Options& options,
              const Section& section,
              std::span<std::byte> arena,
              const Memory& memory,
              Measurement& measurement,
              Report& report) {
  const BlockSequence host_blocks(arena, memory.host_pool.span(), FarSide::kHostPool,
                                  section.chunk_bytes);
  const BlockSequence ring_blocks(arena, memory.ring.span(), FarSide::kDeviceRing,
                                  section.chunk_bytes);
  const Scene scene{
      .host_blocks = host_blocks,
      .ring_blocks = ring_blocks,
      .direction = section.direction,
      .pace_gbps = options.pace_gbps,
  };
  report.begin(section);
  for (const WayKind& kind : all_ways()) {
    if (kind.name != kLargeCopyName && !std::regex_search(kind.name, options.ways)) {
      continue;
    }
    report.add(try_way(kind, scene, measurement));
    // A failure of the device itself would be that of all ways after it.
    KVFERRY_PROBE_CUDA(cudaDeviceSynchronize());
  }
}

int run(const Options& options) {
  KVFERRY_PROBE_CUDA(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
  std::FILE* table = options.json ? stderr : stdout;
  nlohmann::json json = describe_device();
  fmt::print(table, "{}, {} multiprocessors, driver of CUDA {}\n",
             json["device"].get<std::string>(), json["multiprocessors"].get<int>(),
             json["driver_cuda_version"].get<int>());

  const Memory memory;
  Decode decode;
  Measurement measurement(decode, std::chrono::duration<double>(options.seconds));
  Report report(table);
  for (const std::size_t arena_bytes : options.arena_bytes) {
    const DeviceMemory arena = allocate_device(arena_bytes);
    KVFERRY_PROBE_CUDA(cudaMemset(arena.data(), 0, arena_bytes));
    for (const Direction direction : options.directions) {
      for (const std::uint32_t chunk_bytes : options.chunk_bytes) {
        try_ways(options, {arena_bytes, direction, chunk_bytes}, arena.span(), memory, measurement,
                 report);
      }
    }
  }
  if (options.json) {
    json["seconds"] = options.seconds;
    json["pace_gbps"] = options.pace_gbps;
    json["results"] = report.json();
    fmt::print("{}\n", json.dump(2));
  }
  return report.has_failures() ? 1 : 0;
}

}  // namespace
}  // namespace kvferry::probes

int main(int argc, char** argv) {
  const kvferry::probes::Options options = kvferry::probes::parse_options(argc, argv);
  try {
    return kvferry::probes::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvferry_copy_ways_probe: {}\n", error.what());
    return 1;
  }
}
