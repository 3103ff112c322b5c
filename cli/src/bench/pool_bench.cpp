// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/pool_bench.hpp"

#include "kvferry/ipc/os/pool_filler.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace kvferry::cli {
namespace {

/// As a mover's.
constexpr std::uint64_t kPieceBytes = 64ULL << 20;

constexpr std::uint64_t kFirstBytes = 1ULL << 30;

enum Step : std::size_t { kFirst, kMake, kRegister, kUnregister, kGiveBack, kSteps };
constexpr std::array<std::string_view, kSteps> kNames = {"first GiB filled", "all filled",
                                                         "register", "unregister", "give back"};

double us_of(ipc::TimePoint start, ipc::TimePoint end) {
  return std::chrono::duration<double, std::micro>(end - start).count();
}

}  // namespace

void bench_pool(BenchContext& context, const BenchShape& shape) {
  const std::uint64_t bytes = context.config().pool_bytes;
  const InstancePlan plan = context.plan(shape, 1, bytes, cache_manager::CopyStrategy::kAuto);
  const auto device = context.bare_device(shape, plan);
  std::array<BenchFigure, kSteps> figures;
  for (std::size_t step = 0; step < kSteps; ++step) {
    figures.at(step).bench = to_string(BenchKind::kPool);
    figures.at(step).strategy = kNames.at(step);
    figures.at(step).path = BenchPath::kBare;
    figures.at(step).pool_bytes = bytes;
    figures.at(step).point.block_bytes = bytes;
    figures.at(step).point.chunk_bytes = std::min(bytes, kPieceBytes);
    figures.at(step).point.regions =
        static_cast<std::uint32_t>((bytes + kPieceBytes - 1) / kPieceBytes);
    figures.at(step).point.blocks = 1;
  }
  for (std::uint32_t i = 0; i < context.config().repeats; ++i) {
    context.doing(fmt::format("pool: {} of {}", i + 1, context.config().repeats));
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    ipc::UniqueFd fd = must(ipc::SharedMemory::create_large_pool("kvferry-bench", bytes, true));
    std::optional<ipc::SharedMapping> mapped = must(ipc::SharedMemory::map_pool(fd, bytes));
    const ipc::SharedMapping& mapping = *mapped;
    std::array<ipc::TimePoint, 2> filled;  // the first GiB, all
    {
      ipc::PoolFiller filler(
          fd, {"kvferry-bench", bytes, 0, ipc::gpu_numa_nodes()}, [](std::uint64_t) {},
          [](const ipc::Error&) {});
      must(filler.wait_filled(kFirstBytes, [] { return false; }));
      filled[0] = ipc::MonotonicClock::now();
      must(filler.wait_filled(bytes, [] { return false; }));
      filled[1] = ipc::MonotonicClock::now();
    }
    const ipc::TimePoint made = ipc::MonotonicClock::now();
    const auto each_piece = [&](auto call) {
      for (std::uint64_t at = 0; at < bytes; at += kPieceBytes) {
        must(call(mapping.data() + at, std::min(kPieceBytes, bytes - at)));
      }
    };
    each_piece([&](void* data, std::uint64_t size) { return device->register_host(data, size); });
    const ipc::TimePoint registered = ipc::MonotonicClock::now();
    each_piece([&](void* data, std::uint64_t) { return device->unregister_host(data); });
    const ipc::TimePoint unregistered = ipc::MonotonicClock::now();
    mapped.reset();
    fd.reset();
    figures[kFirst].us.add(us_of(start, filled[0]));
    figures[kMake].us.add(us_of(start, filled[1]));
    figures[kRegister].us.add(us_of(made, registered));
    figures[kUnregister].us.add(us_of(registered, unregistered));
    figures[kGiveBack].us.add(us_of(unregistered, ipc::MonotonicClock::now()));
  }
  for (BenchFigure& figure : figures) context.report.figures.push_back(std::move(figure));
}

}  // namespace kvferry::cli
