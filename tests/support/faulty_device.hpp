// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "support/forwarding_device.hpp"
#include "support/forwarding_stream.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::test {

/// What a test makes fail.
enum class DeviceCall : std::uint8_t {
  kCopy,
  kCopyRows,
  kGather,
  kScatter,
  kNotify,
  kQuery,
  kRegisterHost,
  kWriteWord
};
inline constexpr std::size_t kDeviceCallKinds = 8;

enum class FaultKind : std::uint8_t {
  kOnce,      ///< The call does nothing, and fails.
  kHalfDone,  ///< Once: it enqueues the first half of what it was to, and fails.
  kBreaks,    ///< As after an uncorrectable error: this call and all later ones fail.
  kHangs      ///< This call and all later ones are taken, and nothing of them ever ends.
};

struct DeviceFault {
  DeviceCall call = DeviceCall::kCopy;
  std::uint64_t number = 1;  ///< Which of the calls of that kind from now on, of all streams.
  FaultKind kind = FaultKind::kOnce;
  std::string text = "it failed";
};

/// What the FaultyDevices of a test do wrong, and when. One fault at a time; beside it copies, or
/// kernels that pack, may be held where they are in their stream. @threading any. @lifetime
/// outlives the devices' streams.
class FaultPlan {
 public:
  FaultPlan() = default;
  FaultPlan(const FaultPlan&) = delete;
  FaultPlan& operator=(const FaultPlan&) = delete;

  void fail(DeviceFault fault) {
    const std::lock_guard lock(mutex_);
    const auto index = static_cast<std::size_t>(fault.call);
    fault.number += calls_.at(index);
    fault_ = std::move(fault);
    fired_ = false;
    where_ = nullptr;
  }
  /// The planned call has come.
  [[nodiscard]] bool fired() {
    const std::lock_guard lock(mutex_);
    return fired_;
  }
  /// The host memory that the failed call was about, as the device's user named it; of copies the
  /// first one's.
  [[nodiscard]] const void* where() {
    const std::lock_guard lock(mutex_);
    return where_;
  }
  [[nodiscard]] std::uint64_t calls(DeviceCall call) {
    const std::lock_guard lock(mutex_);
    return calls_.at(static_cast<std::size_t>(call));
  }

  [[nodiscard]] bool wait_calls(DeviceCall call, std::uint64_t number, ipc::Deadline deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.when(),
                               [&] { return calls_.at(static_cast<std::size_t>(call)) >= number; });
  }

  /// What copies that are held wait for, in the place of a word of this object: a CUDA device's
  /// streams wait for pinned memory only. Before the first is held; outlives all that are.
  void use_gate(std::uint32_t* pinned) {
    const std::lock_guard lock(mutex_);
    gate_ = pinned;
    ipc::StreamWord(gate_).store(let_go_);
  }
  /// Copies from now on stand in their streams until they are let go, in the order in which they
  /// were enqueued.
  void hold_copies() {
    const std::lock_guard lock(mutex_);
    holding_ = true;
  }
  /// Likewise gathers and scatters.
  void hold_kernels() {
    const std::lock_guard lock(mutex_);
    holding_kernels_ = true;
  }
  /// That the last kernel which packs was launched with, at most; 0: its stream has no limit.
  [[nodiscard]] std::uint32_t thread_blocks() {
    const std::lock_guard lock(mutex_);
    return thread_blocks_;
  }
  /// So many of those have been enqueued and held, those that were let go included.
  [[nodiscard]] bool wait_held(std::uint32_t count, ipc::Deadline deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline.when(), [this, count] { return held_ >= count; });
  }
  [[nodiscard]] std::uint32_t held() {
    const std::lock_guard lock(mutex_);
    return held_;
  }
  void let_go(std::uint32_t count = 1) {
    const std::lock_guard lock(mutex_);
    let_go_ += count;
    ipc::StreamWord(gate_).store(let_go_);
  }
  /// Those that are held and all that come.
  void let_all_go() {
    const std::lock_guard lock(mutex_);
    holding_ = false;
    holding_kernels_ = false;
    let_go_ = gated_;
    ipc::StreamWord(gate_).store(let_go_);
  }

 private:
  friend class FaultyStream;
  friend class FaultyDevice;

  enum class Outcome : std::uint8_t { kAsPlanned, kFails, kHalfDone, kIsSwallowed };
  struct Verdict {
    Outcome outcome = Outcome::kAsPlanned;
    std::string text;
    std::optional<std::uint32_t> held;  ///< Wait for this value of the gate first.
  };

  Verdict judge(DeviceCall call, const void* where) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = ++calls_.at(static_cast<std::size_t>(call));
    changed_.notify_all();
    Verdict verdict;
    if (fault_ && !fired_ && fault_->call == call && fault_->number == number) {
      fired_ = true;
      where_ = where;
      verdict = {outcome_of(fault_->kind), fault_->text, std::nullopt};
    } else if (fault_ && fired_ && fault_->kind >= FaultKind::kBreaks) {
      verdict = {outcome_of(fault_->kind), fault_->text, std::nullopt};
    } else if (is_held(call)) {
      verdict.held = ++gated_;
    }
    return verdict;
  }
  [[nodiscard]] bool is_held(DeviceCall call) const {
    switch (call) {
      case DeviceCall::kCopy:
      case DeviceCall::kCopyRows: return holding_;
      case DeviceCall::kGather:
      case DeviceCall::kScatter: return holding_kernels_;
      default: return false;
    }
  }
  void note_kernel(std::uint32_t thread_blocks) {
    const std::lock_guard lock(mutex_);
    thread_blocks_ = thread_blocks;
  }
  void note_held() {
    const std::lock_guard lock(mutex_);
    ++held_;
    changed_.notify_all();
  }
  static Outcome outcome_of(FaultKind kind) {
    switch (kind) {
      case FaultKind::kHalfDone: return Outcome::kHalfDone;
      case FaultKind::kHangs: return Outcome::kIsSwallowed;
      case FaultKind::kOnce:
      case FaultKind::kBreaks: break;
    }
    return Outcome::kFails;
  }

  std::mutex mutex_;  // guards all below but the gate, which streams read
  std::condition_variable changed_;
  std::array<std::uint64_t, kDeviceCallKinds> calls_{};
  std::optional<DeviceFault> fault_;
  bool fired_ = false;
  const void* where_ = nullptr;
  bool holding_ = false;          ///< Copies,
  bool holding_kernels_ = false;  ///< gathers and scatters.
  std::uint32_t thread_blocks_ = 0;
  std::uint32_t gated_ = 0;  ///< Have been given a place before the gate,
  std::uint32_t held_ = 0;   ///< and have been enqueued there.
  std::uint32_t let_go_ = 0;
  std::uint32_t own_gate_ = 0;
  std::uint32_t* gate_ = &own_gate_;
};

/// Of a CUDA device only with FaultPlan::use_gate().
class FaultyStream final : public ForwardingStream {
 public:
  FaultyStream(std::unique_ptr<Stream> real, FaultPlan& plan)
      : ForwardingStream(std::move(real)), plan_(plan) {}

  ipc::Status copy(ipc::CopyDirection direction,
                   std::span<const ipc::CopyOp> ops,
                   ipc::CopyMode mode) override {
    const void* where = ops.empty() ? nullptr : ops.front().host;
    return enqueue(
        DeviceCall::kCopy, where, [&] { return real().copy(direction, ops, mode); },
        [&]() -> ipc::Status {
          if (ops.size() > 1) return real().copy(direction, ops.first(ops.size() / 2), mode);
          if (ops.empty()) return ipc::ok();
          ipc::CopyOp half = ops.front();
          half.size_bytes /= 2;
          return real().copy(direction, {&half, 1}, mode);
        });
  }
  ipc::Status copy_rows(ipc::CopyDirection direction,
                        std::span<const ipc::RowCopyOp> ops) override {
    const void* where = ops.empty() ? nullptr : ops.front().host;
    return enqueue(
        DeviceCall::kCopyRows, where, [&] { return real().copy_rows(direction, ops); },
        [&]() -> ipc::Status {
          if (ops.size() > 1) return real().copy_rows(direction, ops.first(ops.size() / 2));
          if (ops.empty()) return ipc::ok();
          ipc::RowCopyOp half = ops.front();
          half.rows = std::max<std::uint64_t>(half.rows / 2, 1);
          return real().copy_rows(direction, {&half, 1});
        });
  }
  ipc::Status gather(const ipc::RegionTable& table,
                     std::span<const std::uint32_t> ids,
                     ipc::DevicePtr packed,
                     std::uint64_t packed_stride) override {
    plan_.note_kernel(thread_blocks_);
    return enqueue(
        DeviceCall::kGather, packed.raw(),
        [&] { return real().gather(table, ids, packed, packed_stride); },
        [&] { return real().gather(table, ids.first(ids.size() / 2), packed, packed_stride); });
  }
  ipc::Status scatter(const ipc::RegionTable& table,
                      std::span<const std::uint32_t> ids,
                      ipc::DevicePtr packed,
                      std::uint64_t packed_stride) override {
    plan_.note_kernel(thread_blocks_);
    return enqueue(
        DeviceCall::kScatter, packed.raw(),
        [&] { return real().scatter(table, ids, packed, packed_stride); },
        [&] { return real().scatter(table, ids.first(ids.size() / 2), packed, packed_stride); });
  }
  void limit_thread_blocks(std::uint32_t most) noexcept override {
    thread_blocks_ = most;
    real().limit_thread_blocks(most);
  }
  ipc::Status notify(int event_fd) override {
    return enqueue(
        DeviceCall::kNotify, nullptr, [&] { return real().notify(event_fd); },
        [] { return ipc::ok(); });
  }
  ipc::Status write_word(const ipc::StreamWord& word, std::uint32_t value) override {
    return enqueue(
        DeviceCall::kWriteWord, nullptr, [&] { return real().write_word(word, value); },
        [] { return ipc::ok(); });
  }
  ipc::Result<bool> query() override {
    const FaultPlan::Verdict verdict = plan_.judge(DeviceCall::kQuery, nullptr);
    switch (verdict.outcome) {
      case FaultPlan::Outcome::kAsPlanned: return real().query();
      case FaultPlan::Outcome::kIsSwallowed: return false;
      case FaultPlan::Outcome::kFails:
      case FaultPlan::Outcome::kHalfDone: break;
    }
    return KVFERRY_ERROR(kCuda, "{}", verdict.text);
  }

 private:
  template <typename Whole, typename Half>
  ipc::Status enqueue(DeviceCall call, const void* where, Whole whole, Half half) {
    const FaultPlan::Verdict verdict = plan_.judge(call, where);
    switch (verdict.outcome) {
      case FaultPlan::Outcome::kAsPlanned:
        if (!verdict.held) return whole();
        KVFERRY_TRY(real().wait_word(ipc::StreamWord(plan_.gate_), *verdict.held));
        KVFERRY_TRY(whole());
        plan_.note_held();
        return ipc::ok();
      case FaultPlan::Outcome::kIsSwallowed: return ipc::ok();
      case FaultPlan::Outcome::kHalfDone: KVFERRY_TRY(half()); break;
      case FaultPlan::Outcome::kFails: break;
    }
    return KVFERRY_ERROR(kCuda, "{}", verdict.text);
  }

  FaultPlan& plan_;
  std::uint32_t thread_blocks_ = 0;
};

class FaultyDevice final : public ForwardingDevice {
 public:
  FaultyDevice(std::unique_ptr<Device> real, FaultPlan& plan)
      : ForwardingDevice(std::move(real)), plan_(plan) {}

  ipc::Result<std::unique_ptr<ipc::Stream>> make_stream(ipc::StreamPriority priority) override {
    KVFERRY_ASSIGN(auto stream, ForwardingDevice::make_stream(priority));
    return std::unique_ptr<ipc::Stream>(std::make_unique<FaultyStream>(std::move(stream), plan_));
  }
  ipc::Status register_host(void* data, std::uint64_t size_bytes) override {
    const FaultPlan::Verdict verdict = plan_.judge(DeviceCall::kRegisterHost, data);
    switch (verdict.outcome) {
      case FaultPlan::Outcome::kAsPlanned: return ForwardingDevice::register_host(data, size_bytes);
      case FaultPlan::Outcome::kIsSwallowed: return ipc::ok();
      case FaultPlan::Outcome::kFails:
      case FaultPlan::Outcome::kHalfDone: break;
    }
    return KVFERRY_ERROR(kCuda, "{}", verdict.text);
  }

 private:
  FaultPlan& plan_;
};

}  // namespace kvferry::test
