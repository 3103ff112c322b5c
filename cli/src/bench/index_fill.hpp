// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Throws Exception unless all of the job's blocks are well.
void must_be_ok(const worker::Completion& completion);

/// Stores blocks of whole prefixes until the index has so many.
class IndexFill {
 public:
  static constexpr std::uint32_t kPrefixBlocks = 1'000;
  /// Of one store, each from a device block of its own.
  static constexpr std::uint32_t kStoreBlocks = 1'024;
  /// For a call of the client; within it an interruption waits, too.
  static constexpr std::chrono::seconds kAnswer{5};

  /// locality: the prefixes one after another, or all blocks in any order.
  IndexFill(BenchContext& context,
            BenchInstance& instance,
            std::uint64_t prefixes,
            Locality locality);

  /// Throws Exception. name: of the benchmark, for who watches. between: every 64 stores.
  void run(
      std::string_view name, const std::function<void()>& between = [] {});

  /// Hash of block i of a prefix.
  [[nodiscard]] static worker::Digest hash_of(std::uint64_t prefix, std::uint64_t i) {
    return worker::Digest::hash(&i, sizeof(i), prefix);
  }
  /// Of a prefix's first so many.
  [[nodiscard]] static std::vector<worker::Digest> hashes_of(std::uint64_t prefix,
                                                             std::uint32_t count);

 private:
  void store(std::uint64_t first, std::uint64_t count);

  BenchContext& context_;
  BenchInstance& instance_;
  std::vector<std::uint64_t> order_;
};

}  // namespace kvferry::cli
