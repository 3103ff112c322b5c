// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/own_thread.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace kvferry::ipc {

/// An ordered thread with a bounded queue. A caller that finds the queue full waits for room, as
/// with a GPU.
class HostStream final : public Stream {
 public:
  explicit HostStream(std::string device_name);
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  ~HostStream() override;

  [[nodiscard]] Status copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode mode) override;
  [[nodiscard]] Status zero(DevicePtr target, std::uint64_t size_bytes) override;
  [[nodiscard]] Status gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) override;
  [[nodiscard]] Status scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) override;
  [[nodiscard]] Status fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) override;
  [[nodiscard]] Status verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) override;
  [[nodiscard]] Status checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) override;
  [[nodiscard]] Status notify(int event_fd) override;
  [[nodiscard]] Result<bool> query() override;

 private:
  using Regions = std::span<const kernels::StridedRegion>;
  struct CopyWork {
    CopyDirection direction;
    std::vector<CopyOp> ops;
    void run() const;
  };
  struct ZeroWork {
    DevicePtr target;
    std::uint64_t size_bytes = 0;
    void run() const;
  };
  struct PackWork {
    bool gathers;
    Regions regions;
    std::vector<std::uint32_t> ids;
    DevicePtr packed;
    std::uint64_t packed_stride;
    void run() const;
  };
  struct PatternWork {
    Regions regions;
    std::vector<kernels::SeededBlock> blocks;
    std::uint64_t* mismatches;  ///< Null: fill instead of verify.
    void run() const;
  };
  struct ChecksumWork {
    Regions regions;
    std::vector<std::uint32_t> ids;
    std::uint64_t* results;
    void run() const;
  };
  struct NotifyWork {
    UniqueFd event_fd;  ///< A copy: outlives the caller's.
    void run() const;
  };
  using Work = std::variant<CopyWork, ZeroWork, PackWork, PatternWork, ChecksumWork, NotifyWork>;

  [[nodiscard]] Status enqueue(Work work);
  [[nodiscard]] Status enqueue_pack(bool gathers,
                                    const RegionTable& table,
                                    std::span<const std::uint32_t> ids,
                                    DevicePtr packed,
                                    std::uint64_t packed_stride);
  [[nodiscard]] Status check_results(PinnedBuffer& results, std::size_t count) const;
  void run();

  std::string device_name_;
  std::mutex mutex_;  ///< Guards the three below.
  std::deque<Work> queue_;
  bool running_ = false;  ///< The thread works on an item that it has taken.
  bool stopping_ = false;
  std::condition_variable has_work_;
  std::condition_variable has_room_;  ///< Also: everything is done.
  std::optional<OwnThread> thread_;
};

}  // namespace kvferry::ipc
