// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"

#include <cstddef>
#include <memory>

namespace kvferry::cache_manager {

[[nodiscard]] std::unique_ptr<EvictionPolicy> make_lru_policy();
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_lfu_policy();
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_arc_policy(std::size_t capacity);
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_s3fifo_policy(std::size_t capacity);
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_sieve_policy();
/// What is worth least by ReuseModel goes.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_learned_policy(std::size_t capacity);
/// That one, hedged by the ones above.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_reuse_policy(std::size_t capacity);

}  // namespace kvferry::cache_manager
