// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <cstdint>
#include <vector>

/// Messages of the reference worker's scheduler: what users ask it to generate, and what it has the
/// runners of all ranks compute. Part of what kWireVersion counts.
namespace kvferry::ipc {

// ---- user -> scheduler of an engine (generation channel), answered when the request has ended
// ----

struct Generate {
  std::vector<std::uint32_t> prompt;
  std::uint32_t max_tokens = 0;
  template <typename V> void visit(V& v) { v(prompt, max_tokens); }
};
enum class GenerateEnd : std::uint8_t {
  kLength = 1,  ///< All tokens that were asked for.
  kAborted      ///< By a pause; those that there were.
};
constexpr std::uint64_t wire_max(GenerateEnd) {
  return static_cast<std::uint64_t>(GenerateEnd::kAborted);
}
struct GenerateReply {
  GenerateEnd end = GenerateEnd::kLength;
  std::vector<std::uint32_t> tokens;
  /// CacheState::weights when it was let in to compute its first token: those that what it found of
  /// its prompt was computed with.
  Digest weights_first;
  Digest weights_last;              ///< And the last.
  std::uint32_t cached_tokens = 0;  ///< Of the prompt, found in the cache, not computed first.
  std::uint32_t admissions = 0;     ///< How often it got blocks: once more for each retraction.
  template <typename V> void visit(V& v) {
    v(end, tokens, weights_first, weights_last, cached_tokens, admissions);
  }
};

// ---- scheduler -> runner of a rank (step channel), answered when it was observed complete ----

/// Keys and values of `tokens` tokens from the first on, in every region of the block.
struct DecodeWrite {
  GroupId group;
  BlockId block;
  std::uint32_t first_token = 0;
  std::uint32_t tokens = 1;
  std::uint64_t input = 0;  ///< What the model is fed with at these tokens.
  template <typename V> void visit(V& v) { v(group, block, first_token, tokens, input); }
};
/// What attention reads of a block for one sequence of the batch.
struct DecodeRead {
  GroupId group;
  BlockId block;
  std::uint32_t tokens = 0;  ///< From the first one of the block on.
  std::uint32_t sequence = 0;
  std::uint32_t position = 0;  ///< Of the block in its sequence.
  template <typename V> void visit(V& v) { v(group, block, tokens, sequence, position); }
};
/// One pass of the model over a batch: all writes, then all reads.
struct Decode {
  SessionId session;
  Epoch epoch;
  std::uint32_t sequences = 0;
  std::vector<DecodeWrite> writes;
  std::vector<DecodeRead> reads;
  template <typename V> void visit(V& v) { v(session, epoch, sequences, writes, reads); }
};
struct DecodeReply {
  std::vector<std::uint64_t> outputs;  ///< One for each sequence: this rank's part of the sum.
  template <typename V> void visit(V& v) { v(outputs); }
};

// ---- anybody -> runner of a rank (step channel): a pure observation ----

/// The worker's caching allocator, its device and its decode graph.
struct WorkerMemory {
  std::uint64_t reserved = 0;  ///< Bytes taken from the driver: used plus cached.
  std::uint64_t used = 0;      ///< Bytes lent out.
  std::uint64_t peak_reserved = 0;
  std::uint64_t free_on_device = 0;    ///< The driver's view.
  std::vector<std::uint64_t> empties;  ///< How often it was emptied, by EmptyReason from 1 on.
  /// Of the model's passes of ordinary size: one recording serves for as long as the arena comes
  /// back at the same addresses.
  std::uint64_t graph_recordings = 0;
  std::uint64_t graph_launches = 0;
  template <typename V> void visit(V& v) {
    v(reserved, used, peak_reserved, free_on_device, empties, graph_recordings, graph_launches);
  }
};

}  // namespace kvferry::ipc
