// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <unordered_map>

namespace kvferry::worker {

/// When an engine stores a device block in host memory.
enum class WriteMode : std::uint8_t {
  /// As soon as a step has filled it. Nothing is lost by an eviction or a clear of the device.
  kWriteThrough = 1,
  /// Once it has been used a number of times: filled, found on the device, or filled again after it
  /// was evicted. Prefixes that nobody shares take neither link nor host memory.
  kSelective,
  /// When the device is about to evict it: the fewest bytes, but what the device holds alone goes
  /// with its contents in a clear, a re-init or the death of the memory's owner.
  kWriteBack
};
inline constexpr std::array kWriteModes = {WriteMode::kWriteThrough, WriteMode::kSelective,
                                           WriteMode::kWriteBack};

/// "write-through", "selective", "write-back".
[[nodiscard]] std::string_view to_string(WriteMode mode) noexcept;
/// kInvalidArgument for any other text.
[[nodiscard]] ipc::Result<WriteMode> parse_write_mode(std::string_view text);

struct WritePolicyOptions {
  WriteMode mode = WriteMode::kWriteThrough;
  /// kSelective: uses of a block until it is stored, the one that filled it included. 0 is as 1.
  std::uint32_t uses = 2;
  /// kSelective: blocks whose uses are remembered at least; up to twice as many are.
  std::size_t remembered = std::size_t{1} << 17;
};

/// Decides what an engine stores when. The engine tells it what happens to its device blocks, and
/// stores a block when an answer says so; what the host tier has it need not ask about. A "yes" is
/// an advice: a store that fails or is dropped leaves the block as it was. Pure bookkeeping.
/// @threading one thread.
class WritePolicy {
 public:
  explicit WritePolicy(WritePolicyOptions options = {});

  [[nodiscard]] WriteMode mode() const noexcept { return options_.mode; }
  /// A step has written all of a block: whether to store it now.
  [[nodiscard]] bool on_filled(ipc::GroupId group, const ipc::Digest& hash);
  /// A request uses a block that it found on the device: whether to store it now.
  [[nodiscard]] bool on_hit(ipc::GroupId group, const ipc::Digest& hash);
  /// The device needs its place: whether to store it before, which the place then has to wait for.
  [[nodiscard]] bool on_evicting(ipc::GroupId group, const ipc::Digest& hash) const noexcept;
  /// Under other weights nothing of before is used again.
  void forget();
  /// Blocks whose uses are remembered.
  [[nodiscard]] std::size_t remembered() const noexcept { return recent_.size() + older_.size(); }

 private:
  /// Of a block's hash and group.
  using Uses = std::unordered_map<ipc::Digest, std::uint32_t>;
  [[nodiscard]] bool count_use(ipc::GroupId group, const ipc::Digest& hash);

  WritePolicyOptions options_;
  Uses recent_;  ///< Used since older_ was put aside; full, it takes that one's place.
  Uses older_;
};

}  // namespace kvferry::worker
