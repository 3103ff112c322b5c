// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

/// What a host tier stores and removes, told to whoever routes requests by it. The messages have
/// the shape of vLLM's KV events, so that its subscribers read them: three parts, which are a
/// topic, a sequence number of 8 bytes, most significant first, and a batch in msgpack,
///   [time, [event, ...]]
/// where an event is BlockStored, BlockRemoved or AllBlocksCleared. Three things are ours: a block
/// hash is the engine's own 16 bytes; token_ids is empty, since only the engine knows them; and
/// data_parallel_rank, which may stand third in a batch, never does.
namespace kvferry::ipc {

/// How an event is written. kMaps: {"type": "BlockStored", "block_hashes": [...], ...}, as vLLM
/// does today. kArrays: ["BlockStored", [...], ...], by position, as it did until the middle of
/// 2026 and as older subscribers expect.
enum class KvEventEncoding : std::uint8_t { kMaps, kArrays };

/// Blocks that continue each other, first to last.
struct KvStored {
  std::vector<Digest> hashes;
  Digest before;                       ///< What the first one continues; zero: none, or unknown.
  std::uint32_t tokens_per_block = 0;  ///< 0: not known.
  GroupId group;                       ///< group_idx
  std::string group_kind;           ///< kv_cache_spec_kind, as "full_attention"; empty: not known.
  std::uint32_t window_tokens = 0;  ///< kv_cache_spec_sliding_window; 0: none.
  friend bool operator==(const KvStored&, const KvStored&) = default;
};

struct KvRemoved {
  std::vector<Digest> hashes;
  GroupId group;
  friend bool operator==(const KvRemoved&, const KvRemoved&) = default;
};

/// Nothing of the topic is stored any more, in no group.
struct KvCleared {
  friend bool operator==(const KvCleared&, const KvCleared&) = default;
};

using KvEvent = std::variant<KvStored, KvRemoved, KvCleared>;

struct KvEventBatch {
  double time = 0;  ///< Seconds since 1970, of the publisher's clock.
  std::vector<KvEvent> events;
  friend bool operator==(const KvEventBatch&, const KvEventBatch&) = default;
};

/// Where blocks of a host tier are, in every event.
inline constexpr std::string_view kKvMedium = "CPU";

[[nodiscard]] Bytes encode_kv_events(const KvEventBatch& batch, KvEventEncoding encoding);
/// Reads both encodings; fields that it does not know are skipped. Trusts nothing: kProtocol for
/// whatever is no such batch, and for hashes that are not 16 bytes.
[[nodiscard]] Result<KvEventBatch> decode_kv_events(std::span<const std::uint8_t> bytes);

/// Whose blocks a batch is about. Its text is kv@ENGINE/NAMESPACE/ROOT@MODEL, which is the shape
/// kv@POD@MODEL of llm-d: a hash means the same block only under one root (the digest of namespace,
/// model, geometry and weights), so each root is a holder of its own. '%', '/', '@' and bytes that
/// are no printable ASCII are written %XX.
struct KvTopic {
  std::string engine;
  std::string name_space;
  Digest root;
  std::string model;

  [[nodiscard]] std::string text() const;
  /// kProtocol for another shape.
  [[nodiscard]] static Result<KvTopic> parse(std::string_view text);
  friend bool operator==(const KvTopic&, const KvTopic&) = default;
};

/// kInvalidArgument unless it is ipc:///PATH or tcp://HOST:PORT. @param listens HOST is an address
/// of this machine in numbers, or * for all of them
[[nodiscard]] Status check_kv_endpoint(std::string_view endpoint, bool listens);

}  // namespace kvferry::ipc
