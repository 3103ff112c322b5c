// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/peer_calls.hpp"

#include <vector>

namespace kvferry::cache_manager {

// Request ids start at random: a peer that remembers the replies it gave to an earlier manager must
// not take a new request for a repeat.
PeerCalls::PeerCalls(ipc::EventLoop& loop, ipc::ControlServer& server)
    : loop_(loop), server_(server), next_request_((ipc::Digest::random().low() >> 1U) | 1U) {}

PeerCalls::~PeerCalls() {
  for (const auto& [key, waiting] : waiting_) {
    loop_.cancel(waiting.timer);
  }
}

void PeerCalls::send(const ipc::IncarnationId& peer,
                     ipc::MessageKind kind,
                     ipc::Bytes body,
                     ipc::Deadline deadline,
                     Answered answered) {
  ipc::Envelope envelope;
  envelope.kind = kind;
  envelope.request = ipc::RequestId{next_request_++};
  envelope.body = std::move(body);
  const Key key{peer, envelope.request.value};
  Waiting waiting;
  waiting.answered = std::move(answered);
  waiting.timer = loop_.at(deadline.when(), [this, key] {
    answer(key, KVFERRY_ERROR(kTimeout, "peer {} did not answer request {} in time",
                              key.first.hex(), key.second));
  });
  waiting_.emplace(key, std::move(waiting));
  if (ipc::Status sent = server_.send(peer, envelope); !sent) {
    // Answered from the loop, so that the caller never sees its callback before call() returns.
    ipc::Error error = sent.error();
    // kNotFound is about names that a caller gave; this is about a peer that has gone.
    if (error.code == ipc::ErrorCode::kNotFound) error.code = ipc::ErrorCode::kPeerDied;
    loop_.post([this, key, error = std::move(error)] { answer(key, error); });
  }
}

void PeerCalls::answer(const Key& key, ipc::Result<ipc::Envelope> result) {
  auto node = waiting_.extract(key);
  if (node.empty()) {
    return;
  }
  loop_.cancel(node.mapped().timer);
  node.mapped().answered(std::move(result));
}

bool PeerCalls::on_reply(const ipc::IncarnationId& peer, const ipc::Envelope& reply) {
  const Key key{peer, reply.request.value};
  if (!waiting_.contains(key)) {
    return false;
  }
  if (reply.error) {
    answer(key, *reply.error);
  } else {
    answer(key, reply);
  }
  return true;
}

void PeerCalls::on_peer_died(const ipc::IncarnationId& peer) {
  std::vector<Key> keys;
  for (auto at = waiting_.lower_bound({peer, 0}); at != waiting_.end() && at->first.first == peer;
       ++at) {
    keys.push_back(at->first);
  }
  for (const Key& key : keys) {
    answer(key, KVFERRY_ERROR(kPeerDied, "peer {} died before it answered", peer.hex()));
  }
}

}  // namespace kvferry::cache_manager
