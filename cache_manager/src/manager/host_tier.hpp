// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/engine_directory.hpp"
#include "manager/prefix_index.hpp"
#include "manager/sequence_store.hpp"

#include <cstdint>
#include <set>
#include <string>

namespace kvferry::cache_manager {

/// What an engine keeps in the host pool as a whole: its models' prefixes and its sequences.
/// @threading the loop's thread.
class HostTier {
 public:
  HostTier(EngineDirectory& directory, PrefixIndex& index, SequenceStore& sequences)
      : directory_(directory), index_(index), sequences_(sequences) {}

  /// Drops the engine's prefixes, except blocks that living clients of other engines pin or fill.
  /// Sequences stay: their handles outlive a clear. Counts visible blocks.
  [[nodiscard]] std::uint64_t drop_prefixes(const EngineRecord& engine);
  /// As above, of an engine of which nobody is left.
  [[nodiscard]] std::uint64_t drop_departed(const std::string& engine);
  /// The engine has just got its geometry: drops what it kept of any other one, for nothing can use
  /// that any more. Prefixes that another living engine shares stay.
  void drop_other_geometries(const EngineRecord& engine);

 private:
  [[nodiscard]] std::uint64_t drop(const std::string& engine,
                                   const std::set<ipc::IncarnationId>& own);

  EngineDirectory& directory_;
  PrefixIndex& index_;
  SequenceStore& sequences_;
};

}  // namespace kvferry::cache_manager
