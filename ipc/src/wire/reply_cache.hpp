// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>

namespace kvferry::ipc {

/// What became of a peer's requests: those being handled, and the replies of the latest others. The
/// ids of a peer's life grow, so whatever is below them and not remembered has been here before.
class ReplyCache {
 public:
  static constexpr std::size_t kMaxReplies = 64;
  static constexpr std::size_t kMaxReplyBytes = std::size_t{8} << 20;  ///< The newest always fits.
  static constexpr std::size_t kMaxRunning = 16'384;

  enum class Seen : std::uint8_t { kNew = 1, kRunning, kReplied, kForgotten, kTooMany };
  struct Lookup {
    Seen seen = Seen::kNew;
    const Bytes* reply = nullptr;  ///< kReplied; valid until the next call.
  };
  /// Looks a request up; a new one counts as running from now on.
  Lookup begin(RequestId request);
  /// The reply that is remembered; null when there is none.
  [[nodiscard]] const Bytes* find(RequestId request) const;
  /// The encoded reply of a request. Ends its running.
  void finish(RequestId request, Bytes reply);

 private:
  void drop_oldest();

  std::unordered_map<RequestId, std::optional<Bytes>> requests_;  // nothing: running
  std::deque<RequestId> replied_;                                 // oldest first
  std::size_t reply_bytes_ = 0;
  RequestId latest_;
};

}  // namespace kvferry::ipc
