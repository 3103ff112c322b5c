// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/worker/moving_rate.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace kvferry::worker {

/// What an engine does with a prefix that host memory has.
enum class RecomputeMode : std::uint8_t {
  kNever = 1,  ///< Loads all of it.
  kAuto,       ///< Loads it as far as that is faster than computing it again.
  kAlways      ///< Loads nothing.
};
/// "never", "auto", "always".
[[nodiscard]] std::string_view to_string(RecomputeMode mode) noexcept;
/// kInvalidArgument for any other text.
[[nodiscard]] ipc::Result<RecomputeMode> parse_recompute_mode(std::string_view text);

/// What a request would do without and with loads.
struct LoadCosts {
  double bytes_per_second = 0;   ///< Of loads. Not above 0: unknown.
  double tokens_per_second = 0;  ///< Of prefill. Not above 0: unknown.
  double fixed_seconds = 0;      ///< Of a load of any size.
  double ahead_bytes = 0;        ///< Loads of others that go first.
  std::uint32_t tokens_per_block = 1;
};

/// How many blocks of a prefix to use: the others are computed. bytes[i]: to be loaded for block i
/// of the prefix, 0 where it is on the device. The result has the least time until the whole prefix
/// is there, loads and then compute; of equals the one that loads least. The blocks of the prefix
/// that are on the device from its first one on always count: they cost nothing. While one of the
/// rates is unknown, all are used. Pure.
///
/// It grows with bytes_per_second, and never ends in a choice that is slower than loading nothing.
[[nodiscard]] std::uint32_t choose_prefix(std::span<const std::uint64_t> bytes,
                                          const LoadCosts& costs);

struct LoadChoiceOptions {
  RecomputeMode mode = RecomputeMode::kNever;
  /// Tokens of prefill per second that the engine is known for; 0: as measured.
  double tokens_per_second = 0;
  /// What a load of any size takes at least.
  ipc::Duration fixed = std::chrono::microseconds(100);
  /// With kAuto: prefixes of fewer host blocks are not loaded.
  std::uint32_t least_blocks = 1;
  /// With kAuto: when no load has been measured for so long, the next one goes whatever the last
  /// measurements say, so that a link that has become fast is found out: what it measures stands
  /// for all before. Also the time after which a measured load counts half.
  ipc::Duration probe_after = std::chrono::seconds(10);
};

struct LoadChoiceCounts {
  std::uint64_t requests = 0;   ///< That host memory had blocks for.
  std::uint64_t refused = 0;    ///< Of those: nothing was loaded.
  std::uint64_t shortened = 0;  ///< Of those: some of it was loaded.
  std::uint64_t probes = 0;     ///< Loaded to measure the link.
  std::uint64_t blocks = 0;     ///< Places of prefixes that were computed, not loaded.
};

/// Chooses per request, by what loads and prefill have taken lately. There is no hysteresis: a
/// choice costs nothing to take back, and the rates are moving means. @threading one thread.
class LoadChoice {
 public:
  explicit LoadChoice(LoadChoiceOptions options = {});

  struct Decision {
    std::uint32_t used = 0;    ///< Blocks of the prefix to use, of ...
    std::uint32_t length = 0;  ///< ... so many, of which ...
    std::uint32_t free = 0;    ///< ... the first ones are on the device.
    bool probe = false;        ///< Loaded to measure the link.
  };
  /// As choose_prefix(), by the mode and the rates of now. ahead_bytes: see LoadCosts. May be asked
  /// again before the request gets room.
  [[nodiscard]] Decision choose(std::span<const std::uint64_t> bytes,
                                std::uint32_t tokens_per_block,
                                std::uint64_t ahead_bytes,
                                ipc::TimePoint now) const;
  /// It is done as decided.
  void on_done(const Decision& decision, ipc::TimePoint now);
  /// A load that moved so many bytes over the link was submitted and has ended.
  void on_loaded(std::uint64_t bytes, ipc::TimePoint submitted, ipc::TimePoint ended);
  /// So many tokens were computed between two times.
  void on_computed(std::uint64_t tokens, ipc::TimePoint begun, ipc::TimePoint ended);

  /// 0: unknown.
  [[nodiscard]] double bytes_per_second() const noexcept;
  [[nodiscard]] double tokens_per_second() const noexcept;
  [[nodiscard]] const LoadChoiceCounts& counts() const noexcept { return counts_; }

 private:
  [[nodiscard]] bool is_probe_due(ipc::TimePoint now) const noexcept;

  LoadChoiceOptions options_;
  MovingRate load_rate_;
  MovingRate compute_rate_;
  ipc::TimePoint probed_at_{};
  bool probing_ = false;  ///< What the probe takes is not known yet.
  LoadChoiceCounts counts_;
};

}  // namespace kvferry::worker
