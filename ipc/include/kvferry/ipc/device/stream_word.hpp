// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvferry::ipc {

/// A 32-bit word in a PinnedBuffer that streams of this process wait for and write, in their order
/// (Stream::wait_word, Stream::write_word), and that host code reads and writes beside them.
/// @threading any; one writer at a time. @lifetime the buffer outlives it, and all work that names
/// it.
class StreamWord {
 public:
  StreamWord() = default;
  /// @pre aligned to 4 bytes.
  explicit StreamWord(std::uint32_t* place) noexcept : place_(place) {}

  /// What was written to host memory before is visible to whom this lets go on.
  void store(std::uint32_t value) const noexcept;
  [[nodiscard]] std::uint32_t load() const noexcept;
  /// For streams that are not kvferry's: cuStreamWaitValue32() takes it.
  [[nodiscard]] std::uint32_t* address() const noexcept { return place_; }
  [[nodiscard]] explicit operator bool() const noexcept { return place_ != nullptr; }

  /// Whether a wait for that much is over: numbers wrap.
  [[nodiscard]] static constexpr bool has_reached(std::uint32_t value,
                                                  std::uint32_t at_least) noexcept {
    return static_cast<std::int32_t>(value - at_least) >= 0;
  }

 private:
  std::uint32_t* place_ = nullptr;
};

}  // namespace kvferry::ipc
