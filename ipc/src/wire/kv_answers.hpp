// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/kv_event_publisher.hpp"
#include "wire/event_socket.hpp"
#include "wire/kept_batches.hpp"

#include <cstdint>
#include <deque>
#include <list>
#include <string>

namespace kvferry::ipc {

/// Answers the requests for replays and snapshots: a slice of one answer in each round of the loop,
/// in turns, so that neither a large one nor many of them keep the loop from its other work.
/// @threading the loop's thread. @lifetime loop, kept and source outlive it.
class KvAnswers {
 public:
  KvAnswers(EventLoop& loop,
            const std::string& endpoint,
            const Digest& life,
            const KeptBatches& kept,
            KvSnapshotSource& source);
  KvAnswers(const KvAnswers&) = delete;
  KvAnswers& operator=(const KvAnswers&) = delete;
  ~KvAnswers();

  [[nodiscard]] const std::string& endpoint() const noexcept { return socket_.endpoint(); }
  [[nodiscard]] std::uint64_t requests() const noexcept { return requests_; }
  [[nodiscard]] std::uint64_t refused() const noexcept { return refused_; }

 private:
  enum class Form : std::uint8_t { kReplayOfVllm, kReplay, kSnapshot };
  enum class Progress : std::uint8_t { kMore, kWaits, kEnded };
  struct Answer {
    Bytes peer;  ///< Its routing id.
    Form form = Form::kReplay;
    std::uint64_t next = 0;  ///< Of a replay: to be sent next. Of a snapshot: its NEXT.
    std::optional<std::uint64_t> slice = 0;  ///< Of a snapshot: still to be taken from there.
    std::deque<KvSnapshotSource::Part> parts = {};  ///< Taken, and not sent yet.
    bool waits = false;                             ///< For room in its peer's queue.
  };

  void on_socket();
  void receive();
  void begin(const std::vector<Bytes>& request);
  void serve_soon();
  void serve();
  [[nodiscard]] Progress advance(Answer& answer);
  [[nodiscard]] Progress advance_replay(Answer& answer);
  [[nodiscard]] Progress advance_snapshot(Answer& answer);
  [[nodiscard]] Progress end(const Answer& answer);
  [[nodiscard]] static Progress after_send(int error, Progress sent);

  EventLoop& loop_;
  Digest life_;
  const KeptBatches& kept_;
  KvSnapshotSource& source_;
  EventSocket socket_;
  std::list<Answer> answers_;  ///< Whose turn is next comes first; those that wait come last.
  TimerId timer_ = 0;          ///< Of serve(); 0: nothing is to be sent.
  std::uint64_t requests_ = 0;
  std::uint64_t refused_ = 0;
};

}  // namespace kvferry::ipc
