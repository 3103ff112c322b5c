// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/tier_options.hpp"
#include "options.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace kvferry::cli {

/// What the options say of an engine's use of the host tier.
struct TierChoice {
  worker::WritePolicyOptions write;
  std::chrono::milliseconds write_back_wait{50};
  std::uint64_t store_queue = 0;
  std::string prefetch = "off";                   ///< Or the name of a PrefetchStop.
  std::chrono::milliseconds prefetch_timeout{0};  ///< 0: that of PrefetchOptions.
  std::uint32_t prefetch_requests = 8;
  worker::LoadChoiceOptions recompute;
  std::uint32_t unit_blocks = 1;
  std::string name_space = "default";
  std::optional<ipc::Digest> name_space_key;

  [[nodiscard]] worker::TierOptions made() const;
};

/// --write-policy, --write-uses, --write-back-wait, --store-queue, --recompute, --prefill-rate.
void add_write_options(CLI::App& app, TierChoice& choice);
/// --prefetch, --prefetch-requests, --prefetch-timeout.
void add_prefetch_options(CLI::App& app, TierChoice& choice);
/// --unit-blocks.
void add_unit_blocks(CLI::App& app, TierChoice& choice);
/// --namespace, --namespace-key-file.
void add_namespace(CLI::App& app, TierChoice& choice);
/// kInvalidArgument: store units of several blocks do not go with what else was chosen.
[[nodiscard]] ipc::Status check_unit_blocks(const TierChoice& choice);
/// kInvalidArgument as check_uses(): one of these options does not count with what others say.
[[nodiscard]] ipc::Status check_tier_uses(const CLI::App& app,
                                          const Arguments& arguments,
                                          const TierChoice& choice);
/// Likewise where no scheduler goes by any of them.
[[nodiscard]] ipc::Status check_no_tier_uses(const CLI::App& app, const Arguments& arguments);

}  // namespace kvferry::cli
