// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace kvferry::test {

/// Another stream, of which a test changes something.
class ForwardingStream : public ipc::Stream {
 public:
  explicit ForwardingStream(std::unique_ptr<ipc::Stream> real) : real_(std::move(real)) {}

  [[nodiscard]] ipc::Status copy(ipc::CopyDirection direction,
                                 std::span<const ipc::CopyOp> ops,
                                 ipc::CopyMode mode) override {
    return real_->copy(direction, ops, mode);
  }
  [[nodiscard]] ipc::Status copy_rows(ipc::CopyDirection direction,
                                      std::span<const ipc::RowCopyOp> ops) override {
    return real_->copy_rows(direction, ops);
  }
  [[nodiscard]] ipc::Status zero(ipc::DevicePtr target, std::uint64_t size_bytes) override {
    return real_->zero(target, size_bytes);
  }
  [[nodiscard]] ipc::Status copy_within(ipc::DevicePtr source,
                                        ipc::DevicePtr target,
                                        std::uint64_t size_bytes) override {
    return real_->copy_within(source, target, size_bytes);
  }
  [[nodiscard]] ipc::Status gather(const ipc::RegionTable& table,
                                   std::span<const std::uint32_t> ids,
                                   ipc::DevicePtr packed,
                                   std::uint64_t packed_stride) override {
    return real_->gather(table, ids, packed, packed_stride);
  }
  [[nodiscard]] ipc::Status scatter(const ipc::RegionTable& table,
                                    std::span<const std::uint32_t> ids,
                                    ipc::DevicePtr packed,
                                    std::uint64_t packed_stride) override {
    return real_->scatter(table, ids, packed, packed_stride);
  }
  void limit_thread_blocks(std::uint32_t most) noexcept override {
    real_->limit_thread_blocks(most);
  }
  [[nodiscard]] ipc::Status fill_pattern(const ipc::RegionTable& table,
                                         std::span<const kernels::SeededBlock> blocks) override {
    return real_->fill_pattern(table, blocks);
  }
  [[nodiscard]] ipc::Status verify_pattern(const ipc::RegionTable& table,
                                           std::span<const kernels::SeededBlock> blocks,
                                           ipc::PinnedBuffer& results) override {
    return real_->verify_pattern(table, blocks, results);
  }
  [[nodiscard]] ipc::Status checksum(const ipc::RegionTable& table,
                                     std::span<const std::uint32_t> ids,
                                     ipc::PinnedBuffer& results) override {
    return real_->checksum(table, ids, results);
  }
  [[nodiscard]] ipc::Status decode(const ipc::RegionTable& table,
                                   const kernels::DecodePass& pass) override {
    return real_->decode(table, pass);
  }
  [[nodiscard]] ipc::Status fold(ipc::DevicePtr source,
                                 std::uint64_t size_bytes,
                                 std::uint64_t seed,
                                 ipc::DevicePtr sums) override {
    return real_->fold(source, size_bytes, seed, sums);
  }
  [[nodiscard]] ipc::Status expand(ipc::DevicePtr source,
                                   std::uint64_t source_bytes,
                                   ipc::DevicePtr target,
                                   std::uint64_t target_bytes) override {
    return real_->expand(source, source_bytes, target, target_bytes);
  }
  [[nodiscard]] ipc::Status wait_word(const ipc::StreamWord& word,
                                      std::uint32_t at_least) override {
    return real_->wait_word(word, at_least);
  }
  [[nodiscard]] ipc::Status write_word(const ipc::StreamWord& word, std::uint32_t value) override {
    return real_->write_word(word, value);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::RecordedWork>> record(
      const std::function<ipc::Status(ipc::Stream&)>& body) override {
    return real_->record(body);
  }
  [[nodiscard]] ipc::Status launch(const ipc::RecordedWork& work) override {
    return real_->launch(work);
  }
  [[nodiscard]] ipc::Status notify(int event_fd) override { return real_->notify(event_fd); }
  [[nodiscard]] ipc::Result<bool> query() override { return real_->query(); }

 protected:
  [[nodiscard]] ipc::Stream& real() noexcept { return *real_; }

 private:
  std::unique_ptr<ipc::Stream> real_;
};

}  // namespace kvferry::test
