// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace kvferry::worker {

/// Who asked, for the one answer.
struct Asker {
  ipc::IncarnationId peer;
  ipc::Envelope envelope;  ///< Without its body.
};

struct TableBlock {
  ipc::BlockId block;
  bool indexed = false;  ///< Others may find it, under the hash of its position.
  bool found = false;    ///< It was on the device when the sequence was let in.
  bool judged = false;   ///< The write policy knows of this use ...
  bool wanted = false;   ///< ... and wants it in host memory.
};

/// One request, from its arrival to its answer. It holds blocks while it is let in.
struct Sequence {
  enum class State : std::uint8_t {
    kWaiting,  ///< Holds no block.
    kLoading,  ///< Blocks of its prefix are on their way from host memory.
    kReady,    ///< For the next pass.
    kRunning,  ///< In the pass that runs.
    kFrozen    ///< Stopped by a pause, with its blocks.
  };
  /// What becomes of it when nothing of it is in flight any more.
  enum class Fate : std::uint8_t {
    kGoesOn,
    kWaits,  ///< It gives its blocks up, and waits to be let in again.
    kEnds    ///< It was answered, or nobody waits for the answer.
  };

  std::uint64_t number = 0;  ///< In the order of arrival.
  Asker asker;
  std::uint32_t prompt_tokens = 0;
  std::uint32_t max_tokens = 0;
  std::vector<std::uint32_t> tokens;  ///< Of the prompt, then those generated.
  std::vector<std::uint64_t> inputs;  ///< model_input() of each token.
  std::vector<ipc::Digest> hashes;    ///< Of each block that is full of tokens.

  State state = State::kWaiting;
  /// Its block table: by group, then by place in the sequence. Groups that do not need a block
  /// any more, or never did, have none there.
  std::vector<std::map<std::uint32_t, TableBlock>> table;
  std::uint32_t computed = 0;   ///< Tokens whose keys and values are there.
  std::uint32_t planned = 0;    ///< Of kRunning: computed after the pass.
  std::uint32_t published = 0;  ///< Full blocks that others were told of.
  std::uint32_t judged = 0;     ///< Blocks of units that the write policy knows all of.
  std::uint32_t settled = 0;    ///< Blocks of units of which nothing is left to be stored.
  Fate fate = Fate::kGoesOn;
  /// Some of its blocks were computed with other weights than are in use: nobody else finds them.
  bool mixed = false;
  std::uint32_t load_tries = 0;
  bool device_only = false;  ///< A load failed: it computes what host memory has.

  ipc::Digest weights_first;  ///< In use when it was let in, to compute its first token.
  ipc::Digest weights_last;   ///< In use when its latest one was computed.
  std::uint32_t cached_tokens = 0;
  std::uint32_t cached_at = 0;  ///< The admission that these are of; 0: of none yet.
  std::uint32_t admissions = 0;

  /// What this admission was to find in host memory did not come: the next one tells.
  void found_nothing() noexcept {
    if (cached_at == admissions) cached_at = cached_tokens = 0;
  }
  [[nodiscard]] std::uint32_t length() const noexcept {
    return static_cast<std::uint32_t>(tokens.size());
  }
  [[nodiscard]] std::uint32_t generated() const noexcept { return length() - prompt_tokens; }
  [[nodiscard]] bool in_flight() const noexcept {
    return state == State::kLoading || state == State::kRunning;
  }
};

}  // namespace kvferry::worker
