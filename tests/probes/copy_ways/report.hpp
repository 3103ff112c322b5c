// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/measure.hpp"
#include "probes/copy_ways/way.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::probes {

/// What the figures of a section have in common.
struct Section {
  std::size_t arena_bytes;
  Direction direction;
  std::uint32_t chunk_bytes;
};

struct WayResult {
  std::string name;
  std::optional<Figures> nothing_beside;
  std::optional<Figures> beside_decode;
  std::string failure;  ///< empty when it was measured
};

/// Prints each result as it comes, beside what one large copy reached in the same section.
class Report {
 public:
  explicit Report(std::FILE* table) : table_(table) {}

  void begin(const Section& section);
  /// One large copy comes first in each section.
  void add(WayResult result);

  bool has_failures() const;
  nlohmann::json json() const;

 private:
  struct SectionResults {
    Section section;
    std::vector<WayResult> results;
  };

  void print(const WayResult& result, const WayResult& large_copy) const;

  std::FILE* table_;
  std::vector<SectionResults> sections_;
};

}  // namespace kvferry::probes
