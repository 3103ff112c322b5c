// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/kv_events.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace kvferry::ipc {

/// Follows a publisher of KV events: begins with a snapshot where it can ask for one, sees what is
/// missing, asks for that, and begins anew when the publisher is another one or no longer has it.
/// Whoever applies what next() gives, in that order, has the publisher's picture. It asks once a
/// second, too, whether it is up to date, since nothing else tells that the last batch was lost.
/// @threading one at a time.
class KvEventSubscriber {
 public:
  struct Options {
    std::string endpoint;
    std::string snapshot_endpoint;  ///< Empty: there is nobody to ask.
  };
  struct News {
    enum class Kind : std::uint8_t {
      kReset,     ///< Nothing is known: forget all. A snapshot follows.
      kSnapshot,  ///< A piece of it.
      kComplete,  ///< The snapshot's end. sequence: the first that is not in it.
      kLive,      ///< A batch in its turn.
      kReplayed,  ///< Likewise, which came late.
      kLost       ///< From sequence to until: lost for good, with nobody to ask.
    };
    Kind kind = Kind::kLive;
    std::uint64_t sequence = 0;
    std::uint64_t until = 0;
    std::string topic;
    KvEventBatch batch;
  };

  /// Throws Exception: an endpoint is none.
  explicit KvEventSubscriber(const Options& options);
  KvEventSubscriber(const KvEventSubscriber&) = delete;
  KvEventSubscriber& operator=(const KvEventSubscriber&) = delete;
  ~KvEventSubscriber();

  /// Nothing when the deadline has passed first. kProtocol for a batch that cannot be read: it is
  /// passed over.
  [[nodiscard]] Result<std::optional<News>> next(Deadline deadline);
  /// Somebody who may tell is at the endpoint, as far as is known without waiting: right after the
  /// begin nobody is.
  [[nodiscard]] bool is_connected() noexcept;
  /// The number that follows what next() has given; nothing before the first snapshot or batch.
  [[nodiscard]] std::optional<std::uint64_t> expected() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::ipc
