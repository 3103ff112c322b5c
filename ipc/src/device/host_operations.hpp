// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_work.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace kvferry::ipc {

/// Turns the calls of a stream into items of work, once their arguments have been found valid.
class HostOperations : public Stream {
 public:
  [[nodiscard]] Status copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode mode) override;
  [[nodiscard]] Status copy_rows(CopyDirection direction, std::span<const RowCopyOp> ops) override;
  [[nodiscard]] Status zero(DevicePtr target, std::uint64_t size_bytes) override;
  [[nodiscard]] Status copy_within(DevicePtr source,
                                   DevicePtr target,
                                   std::uint64_t size_bytes) override;
  [[nodiscard]] Status gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) override;
  [[nodiscard]] Status scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) override;
  void limit_thread_blocks(std::uint32_t /*most*/) noexcept override {}
  [[nodiscard]] Status fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) override;
  [[nodiscard]] Status verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) override;
  [[nodiscard]] Status checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) override;
  [[nodiscard]] Status decode(const RegionTable& table, const kernels::DecodePass& pass) override;
  [[nodiscard]] Status fold(DevicePtr source,
                            std::uint64_t size_bytes,
                            std::uint64_t seed,
                            DevicePtr sums) override;
  [[nodiscard]] Status expand(DevicePtr source,
                              std::uint64_t source_bytes,
                              DevicePtr target,
                              std::uint64_t target_bytes) override;
  [[nodiscard]] Status wait_word(const StreamWord& word, std::uint32_t at_least) override;
  [[nodiscard]] Status write_word(const StreamWord& word, std::uint32_t value) override;

 protected:
  explicit HostOperations(std::string device_name) : device_name_(std::move(device_name)) {}
  [[nodiscard]] const std::string& device_name() const noexcept { return device_name_; }

  /// Runs the item in its turn, or keeps it.
  [[nodiscard]] virtual Status take(host_work::Item item) = 0;

 private:
  [[nodiscard]] Status take_pack(bool gathers,
                                 const RegionTable& table,
                                 std::span<const std::uint32_t> ids,
                                 DevicePtr packed,
                                 std::uint64_t packed_stride);
  [[nodiscard]] Status check_results(PinnedBuffer& results, std::size_t count) const;

  std::string device_name_;
};

}  // namespace kvferry::ipc
