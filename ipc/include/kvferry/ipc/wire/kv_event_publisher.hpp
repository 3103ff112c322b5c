// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/kv_events.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// The publisher's side of KV events, and its answers to those who have missed some.
///
/// Every batch has the next sequence number, over all topics, from 0 on; none is left out. So one
/// who takes all topics and sees a number missing has missed that batch: a subscriber that reads
/// too slowly loses what its queue does not hold, and nobody waits for it. (Who takes some topics
/// alone sees gaps that are none.)
///
/// A second socket, a ROUTER, answers. A request is an empty part, a sequence number of 8 bytes
/// and, unless it comes from a subscriber written for vLLM, a word:
///
///   ["", FROM]              -> ["", SEQ, batch] ..., ["", -1, ""]         as vLLM's replay
///   ["", FROM, "replay"]    -> ["", SEQ, batch, topic] ..., ["", -1, life, NEXT]
///   ["", any, "snapshot"]   -> ["", NEXT, batch, topic] ..., ["", -1, life, NEXT]
///
/// A replay is what is still kept from FROM on; its first number is greater where some of that is
/// not. A snapshot is all that is stored, as BlockStored. life is 16 bytes, another one in each
/// life of the publisher: numbers of one life say nothing about those of another. NEXT is the
/// number from which what follows has to be taken: the live events from there on, those held back
/// meanwhile included, complete the picture.
///
/// A snapshot is taken in slices, between which blocks come and go, and yet is right once the
/// events from its NEXT on have been applied to it, in their order. NEXT is the number that the
/// next batch had when the snapshot began; slices come later. Take a block and a topic. If any
/// event from NEXT on is about it, then after the last of these the picture says what that one
/// says, whatever the snapshot had said: to store what is there, and to remove what is not, changes
/// nothing. If there is none, it has not changed since the snapshot began, so its slice has told
/// the truth. (A block's place in the slices does not change while it is stored, so none is passed
/// over.) A snapshot names no order: a block may come before the one that it continues.
namespace kvferry::ipc {

/// What is stored, for those who come late. Called on the loop's thread.
class KvSnapshotSource {
 public:
  struct Part {
    std::string topic;
    Bytes batch;
  };
  struct Slice {
    std::vector<Part> parts;
    std::optional<std::uint64_t> next;  ///< Where the next one begins; nothing: that was all.
  };
  virtual ~KvSnapshotSource() = default;
  /// A piece that takes less than a millisecond. @param from 0, or the next of another slice
  [[nodiscard]] virtual Slice slice(std::uint64_t from) = 0;
};

/// @threading the loop's thread only. @lifetime loop and source outlive it.
class KvEventPublisher {
 public:
  struct Options {
    std::string endpoint;
    std::string snapshot_endpoint;  ///< Empty: nobody can ask.
    Digest life = Digest::random();
    int most_queued = 2000;              ///< Batches that a slow subscriber may be behind.
    std::size_t kept_batches = 10'000;   ///< For replays.
    std::size_t kept_bytes = 64U << 20;  ///< Likewise; the newest batch is always kept.
  };
  struct Stats {
    std::uint64_t batches = 0;  ///< Also the next sequence number.
    std::uint64_t events = 0;
    std::uint64_t dropped = 0;   ///< Batches that some subscriber was too slow for.
    std::uint64_t requests = 0;  ///< For replays and snapshots.
    std::uint64_t refused = 0;   ///< Of them, those that were none.
    std::size_t kept_batches = 0;
    std::size_t kept_bytes = 0;
  };
  /// So many at a time; beyond them one that waits for its peer to read gives up its place.
  static constexpr std::size_t kMostAnswers = 64;

  /// Throws Exception: another process listens at an endpoint (kAlreadyExists), or it is none.
  KvEventPublisher(EventLoop& loop, Options options, KvSnapshotSource& source);
  KvEventPublisher(const KvEventPublisher&) = delete;
  KvEventPublisher& operator=(const KvEventPublisher&) = delete;
  ~KvEventPublisher();

  /// Never blocks. @param events how many the batch has
  void publish(const std::string& topic, Bytes batch, std::uint64_t events);
  [[nodiscard]] Stats stats() const noexcept;
  /// With the ports that they were given where they asked for port 0; the second may be empty.
  [[nodiscard]] const std::string& endpoint() const noexcept;
  [[nodiscard]] const std::string& snapshot_endpoint() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::ipc
