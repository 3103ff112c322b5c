// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// Device memory of a worker that is released and resumed together.
enum class MemoryTag : std::uint8_t {
  kKvCache = 1,  ///< The arena. Goes through the unlink handshake, in either role.
  kWeights,
  kScratch  ///< What steps compute with beside the two: workspaces, buffers of recorded work.
};
inline constexpr std::array kMemoryTags{MemoryTag::kKvCache, MemoryTag::kWeights,
                                        MemoryTag::kScratch};
constexpr std::uint64_t wire_max(MemoryTag) {
  return static_cast<std::uint64_t>(MemoryTag::kScratch);
}
/// "kv_cache", "weights", "scratch".
[[nodiscard]] std::string_view to_string(MemoryTag tag) noexcept;

/// A set of them.
class MemoryTags {
 public:
  constexpr MemoryTags() = default;
  constexpr MemoryTags(std::initializer_list<MemoryTag> tags) {
    for (const MemoryTag tag : tags) add(tag);
  }
  [[nodiscard]] static constexpr MemoryTags all() noexcept {
    return {MemoryTag::kKvCache, MemoryTag::kWeights, MemoryTag::kScratch};
  }

  [[nodiscard]] constexpr bool empty() const noexcept { return bits_ == 0; }
  [[nodiscard]] constexpr bool has(MemoryTag tag) const noexcept { return (bits_ & bit(tag)) != 0; }
  constexpr void add(MemoryTag tag) noexcept { bits_ |= bit(tag); }
  constexpr void remove(MemoryTag tag) noexcept {
    bits_ = static_cast<std::uint8_t>(bits_ & ~bit(tag));
  }
  [[nodiscard]] constexpr MemoryTags operator|(MemoryTags other) const noexcept {
    return MemoryTags(static_cast<std::uint8_t>(bits_ | other.bits_));
  }
  [[nodiscard]] constexpr MemoryTags operator-(MemoryTags other) const noexcept {
    return MemoryTags(static_cast<std::uint8_t>(bits_ & ~other.bits_));
  }
  /// Bits of others than those above, such as a newer peer's, are an error: kInvalidArgument.
  [[nodiscard]] Status check() const;
  template <typename V> void visit(V& v) { v(bits_); }
  friend constexpr bool operator==(MemoryTags a, MemoryTags b) noexcept = default;

 private:
  explicit constexpr MemoryTags(std::uint8_t bits) : bits_(bits) {}
  [[nodiscard]] static constexpr std::uint8_t bit(MemoryTag tag) noexcept {
    return static_cast<std::uint8_t>(1U << (static_cast<unsigned>(tag) - 1));
  }
  std::uint8_t bits_ = 0;
};
/// "kv_cache, scratch"; "nothing".
[[nodiscard]] std::string to_string(MemoryTags tags);

/// What becomes of the contents of released weights.
enum class WeightsBackup : std::uint8_t {
  kHost = 1,  ///< A copy in this process's host memory; a resume brings them back bit for bit.
  kNone       ///< They are gone: after a resume nothing computes before an update of the weights.
};
constexpr std::uint64_t wire_max(WeightsBackup) {
  return static_cast<std::uint64_t>(WeightsBackup::kNone);
}

/// A worker's device memory beside the arena, as releases and resumes reach it. Steps are held
/// meanwhile and until the resume: an engine refuses those that come all the same.
/// @threading a thread of its own, one call at a time, the one that WeightsUser is called on.
/// @lifetime outlives the worker's registration.
class MemoryUser {
 public:
  MemoryUser() = default;
  MemoryUser(const MemoryUser&) = delete;
  MemoryUser& operator=(const MemoryUser&) = delete;
  virtual ~MemoryUser() = default;

  /// Gives the memory of the tag, kWeights or kScratch, back to the caching allocator, which is
  /// emptied afterwards. Returns its bytes. After an error it is all still there. A tag of which
  /// this worker has nothing is 0 bytes.
  [[nodiscard]] virtual Result<std::uint64_t> release(MemoryTag tag,
                                                      WeightsBackup backup,
                                                      Deadline deadline) = 0;
  /// Takes the memory of a released tag again, with what it held where there is a backup. Returns
  /// its bytes. After an error (kNoDeviceMemory, say) it is all still released, backup included.
  [[nodiscard]] virtual Result<std::uint64_t> resume(MemoryTag tag, Deadline deadline) = 0;
};

}  // namespace kvferry::ipc
