// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/arena_blocks.hpp"
#include "bench/figure.hpp"
#include "bench/shape.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// How copies are made without any process around them.
enum class BareStrategy : std::uint8_t {
  kMemcpy = 1,  ///< One copy per chunk.
  kBatch,       ///< All chunks of a job in one batched call.
  kStrided,     ///< A block's chunks as the rows of strided copies, where they lie at one distance.
  kKernel       ///< A kernel that reads and writes host memory itself.
};
[[nodiscard]] std::string_view to_string(BareStrategy strategy) noexcept;
inline constexpr std::array kBareStrategies = {BareStrategy::kMemcpy, BareStrategy::kBatch,
                                               BareStrategy::kStrided, BareStrategy::kKernel};

/// An arena and pinned host memory in this process, and copies between them: what the link gives,
/// and what others' ways of copying make of it. @threading one thread.
class BareCopies {
 public:
  /// Of the limit's one copy.
  static constexpr std::uint64_t kCudaLimitBytes = 256ULL << 20;
  static constexpr std::uint64_t kHostLimitBytes = 32ULL << 20;

  /// host_blocks: so many blocks of the shape fit into the host memory of each way. Throws
  /// Exception. The device outlives this.
  BareCopies(ipc::Device& device,
             const BenchShape& shape,
             const ipc::ArenaLayout& layout,
             std::uint32_t host_blocks);

  /// GB/s of one large copy each way.
  [[nodiscard]] ipc::Result<double> limit(Way way);
  /// That it moves each way.
  [[nodiscard]] std::uint64_t limit_bytes() const noexcept { return kLimitCopies * limit_bytes_; }
  /// Microseconds until one copy of so many bytes has been seen to end.
  [[nodiscard]] ipc::Result<double> one_copy(Way way, std::uint64_t size_bytes);
  /// Jobs of a way, one behind the other: first to the host, second to the device.
  using Jobs = std::array<std::vector<std::vector<worker::SequenceItem>>, 2>;
  /// GB/s of such jobs, again and again until so many bytes of each way are under way.
  [[nodiscard]] ipc::Result<double> move(BareStrategy strategy,
                                         Way way,
                                         const Jobs& jobs,
                                         std::uint64_t bytes_each_way);
  /// The same for one job at a time: microseconds until it has been seen to end.
  [[nodiscard]] ipc::Result<double> one_job(BareStrategy strategy,
                                            Way way,
                                            const std::vector<worker::SequenceItem>& blocks);

 private:
  struct Lane {
    std::unique_ptr<ipc::Stream> stream;
    std::unique_ptr<ipc::PinnedBuffer> host;
    std::unique_ptr<ipc::DeviceMemory> flat;  ///< What large copies copy.
    ipc::EventFd ended;
    std::vector<ipc::CopyOp> ops;  ///< Kept: no memory is taken while it is measured.
    std::vector<ipc::RowCopyOp> rows;
    std::vector<std::uint32_t> ids;
  };

  [[nodiscard]] ipc::Status enqueue(BareStrategy strategy,
                                    std::size_t lane,
                                    const std::vector<worker::SequenceItem>& blocks);
  [[nodiscard]] static ipc::Status wait(Lane& lane, ipc::Deadline deadline);
  [[nodiscard]] ipc::Status enqueue_large(Way way, std::uint64_t size_bytes);
  [[nodiscard]] std::uint64_t bytes_of(const std::vector<worker::SequenceItem>& blocks) const;
  /// Seconds from the first enqueue until the lanes of the way have been seen to end.
  [[nodiscard]] ipc::Result<double> time(Way way, const std::function<ipc::Status()>& fill);

  /// Several, so that starting and ending them does not count.
  static constexpr std::uint64_t kLimitCopies = 4;

  const std::uint64_t limit_bytes_;
  ArenaBlocks arena_;
  std::array<Lane, 2> lanes_;  ///< To the host, to the device.
};

}  // namespace kvferry::cli
