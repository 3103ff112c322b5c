// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>

/// Between who keeps a host pool and who wants it: one packet each way, on a socket of its own.
namespace kvferry::ipc {

enum class KeeperAsk : std::uint8_t { kGive = 1, kDrop };
constexpr std::uint64_t wire_max(KeeperAsk) { return static_cast<std::uint64_t>(KeeperAsk::kDrop); }

struct KeeperRequest {
  std::uint32_t version = kWireVersion;
  KeeperAsk ask = KeeperAsk::kGive;
  Digest pool;  ///< To be dropped.
  /// Who asks is the next manager: the earlier one is dead, whether or not the keeper has noticed,
  /// which is waited for.
  bool succeeds = false;
  template <typename V> void visit(V& v) { v(version, ask, pool, succeeds); }
};
/// To kGive, with the descriptors of pool and catalogue unless it is in use.
struct KeeperReply {
  std::uint32_t version = kWireVersion;
  Digest pool;  ///< Zero: nothing is kept.
  std::uint64_t pool_bytes = 0;
  std::uint64_t catalogue_bytes = 0;
  bool in_use = false;
  std::optional<Error> refused;
  template <typename V> void visit(V& v) {
    v(version, pool, pool_bytes, catalogue_bytes, in_use, refused);
  }
};

}  // namespace kvferry::ipc
