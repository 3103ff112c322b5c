// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>

namespace kvferry::cache_manager {

/// Requests of the manager to its peers. Each is answered exactly once: by the peer's reply (or the
/// error in it), by kPeerDied when the kernel proves the peer dead, or by kTimeout.
/// @threading the loop's thread. @lifetime loop and server outlive it.
class PeerCalls {
 public:
  using Answered = std::function<void(ipc::Result<ipc::Envelope>)>;

  PeerCalls(ipc::EventLoop& loop, ipc::ControlServer& server);
  PeerCalls(const PeerCalls&) = delete;
  PeerCalls& operator=(const PeerCalls&) = delete;
  ~PeerCalls();

  template <typename T>
  void call(const ipc::IncarnationId& peer,
            ipc::MessageKind kind,
            const T& body,
            ipc::Deadline deadline,
            Answered&& answered) {
    send(peer, kind, ipc::encode(body), deadline, std::move(answered));
  }
  /// A reply; false when nobody waits for it (any more).
  bool on_reply(const ipc::IncarnationId& peer, const ipc::Envelope& reply);
  void on_peer_died(const ipc::IncarnationId& peer);

 private:
  using Key = std::pair<ipc::IncarnationId, std::uint64_t>;
  struct Waiting {
    Answered answered;
    ipc::TimerId timer = 0;
  };

  void send(const ipc::IncarnationId& peer,
            ipc::MessageKind kind,
            ipc::Bytes body,
            ipc::Deadline deadline,
            Answered answered);
  void answer(const Key& key, ipc::Result<ipc::Envelope> result);

  ipc::EventLoop& loop_;
  ipc::ControlServer& server_;
  std::map<Key, Waiting> waiting_;
  std::uint64_t next_request_;
};

}  // namespace kvferry::cache_manager
