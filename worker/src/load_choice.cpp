// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_choice.hpp"

#include <algorithm>

namespace kvferry::worker {
namespace {

/// Half of what is known comes from the latest so many bytes, or tokens.
constexpr double kLoadHalfLife = 64.0 * 1024 * 1024;
constexpr double kComputeHalfLife = 64.0 * 1024;

std::uint32_t count_on_device(std::span<const std::uint64_t> bytes) {
  const auto first =
      std::find_if(bytes.begin(), bytes.end(), [](std::uint64_t size) { return size > 0; });
  return static_cast<std::uint32_t>(first - bytes.begin());
}

}  // namespace

std::string_view to_string(RecomputeMode mode) noexcept {
  switch (mode) {
    case RecomputeMode::kNever: return "never";
    case RecomputeMode::kAuto: return "auto";
    case RecomputeMode::kAlways: return "always";
  }
  return "never";
}

ipc::Result<RecomputeMode> parse_recompute_mode(std::string_view text) {
  for (const auto mode : {RecomputeMode::kNever, RecomputeMode::kAuto, RecomputeMode::kAlways}) {
    if (text == to_string(mode)) return mode;
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of auto|never|always", text);
}

std::uint32_t choose_prefix(std::span<const std::uint64_t> bytes, const LoadCosts& costs) {
  const auto length = static_cast<std::uint32_t>(bytes.size());
  if (!(costs.bytes_per_second > 0) || !(costs.tokens_per_second > 0)) return length;
  const double block_seconds = costs.tokens_per_block / costs.tokens_per_second;
  // Compared by what a choice saves against loading nothing: times that all have cancel out.
  const std::uint32_t free = count_on_device(bytes);
  std::uint32_t best = free;
  double most_saved = 0;
  double loaded = 0;
  for (std::uint32_t used = free + 1; used <= length; ++used) {
    loaded += static_cast<double>(bytes[used - 1]);
    const double seconds = std::max(costs.fixed_seconds, 0.0) +
                           (std::max(costs.ahead_bytes, 0.0) + loaded) / costs.bytes_per_second;
    const double saved = (used - free) * block_seconds - seconds;
    // A block on the device that follows is free: with it, more is saved and nothing more loaded.
    if (saved > most_saved) {
      most_saved = saved;
      best = used;
    }
  }
  return best;
}

LoadChoice::LoadChoice(LoadChoiceOptions options)
    : options_(options),
      load_rate_(kLoadHalfLife, options.probe_after),
      compute_rate_(kComputeHalfLife) {}

double LoadChoice::bytes_per_second() const noexcept { return load_rate_.per_second().value_or(0); }

double LoadChoice::tokens_per_second() const noexcept {
  if (options_.tokens_per_second > 0) return options_.tokens_per_second;
  return compute_rate_.per_second().value_or(0);
}

bool LoadChoice::is_probe_due(ipc::TimePoint now) const noexcept {
  return now - std::max(load_rate_.seen(), probed_at_) >= options_.probe_after;
}

LoadChoice::Decision LoadChoice::choose(std::span<const std::uint64_t> bytes,
                                        std::uint32_t tokens_per_block,
                                        std::uint64_t ahead_bytes,
                                        ipc::TimePoint now) const {
  Decision decision;
  decision.length = static_cast<std::uint32_t>(bytes.size());
  decision.free = count_on_device(bytes);
  decision.used = decision.length;
  switch (options_.mode) {
    case RecomputeMode::kNever: break;
    case RecomputeMode::kAlways: decision.used = decision.free; break;
    case RecomputeMode::kAuto: {
      LoadCosts costs;
      costs.bytes_per_second = bytes_per_second();
      costs.tokens_per_second = tokens_per_second();
      costs.fixed_seconds = std::chrono::duration<double>(options_.fixed).count();
      costs.ahead_bytes = static_cast<double>(ahead_bytes);
      costs.tokens_per_block = tokens_per_block;
      decision.used = choose_prefix(bytes, costs);
      const auto loads = std::count_if(bytes.begin(), bytes.begin() + decision.used,
                                       [](std::uint64_t size) { return size > 0; });
      if (loads < options_.least_blocks) decision.used = decision.free;
      decision.probe = decision.used < decision.length && is_probe_due(now);
      if (decision.probe) decision.used = decision.length;
      break;
    }
  }
  return decision;
}

void LoadChoice::on_done(const Decision& decision, ipc::TimePoint now) {
  if (decision.free == decision.length) return;
  ++counts_.requests;
  if (decision.probe) {
    probed_at_ = now;
    probing_ = true;
    ++counts_.probes;
  }
  if (decision.used < decision.length) {
    ++(decision.used == decision.free ? counts_.refused : counts_.shortened);
  }
  counts_.blocks += decision.length - decision.used;
}

void LoadChoice::on_loaded(std::uint64_t bytes, ipc::TimePoint submitted, ipc::TimePoint ended) {
  if (bytes > 0 && probing_ && submitted >= probed_at_) {
    probing_ = false;
    load_rate_.forget();
  }
  // What any load takes is no part of the rate: choices count it on top. A part of the time is left
  // to the bytes, whatever that is set to.
  const ipc::Duration took = std::max(ended - submitted, ipc::Duration::zero());
  const ipc::Duration fixed = std::clamp(options_.fixed, ipc::Duration::zero(), took / 2);
  load_rate_.observe(static_cast<double>(bytes), submitted + fixed, ended);
}

void LoadChoice::on_computed(std::uint64_t tokens, ipc::TimePoint begun, ipc::TimePoint ended) {
  compute_rate_.observe(static_cast<double>(tokens), begun, ended);
}

}  // namespace kvferry::worker
