// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

namespace kvferry::test {

/// A small model: one full group and one state group, sharded over two ranks.
[[nodiscard]] ipc::Geometry tiny_geometry(std::uint32_t ranks = 2);
inline constexpr std::uint32_t kTinyBlocks = 16;  ///< Device blocks of each group.

/// A peer of a real manager over a real control link that says exactly what a test tells it to.
/// @threading one thread.
class ScriptedPeer {
 public:
  /// Throws ipc::Exception when the manager does not answer.
  ScriptedPeer(const std::string& runtime_dir,
               ipc::ProcessKind kind,
               std::string name,
               const ipc::IncarnationId& id = ipc::Digest::random());

  [[nodiscard]] const ipc::IncarnationId& id() const noexcept { return id_; }
  [[nodiscard]] ipc::ControlLink& link() noexcept { return *link_; }

  // Workers and movers.
  [[nodiscard]] ipc::Result<ipc::Empty> rank_hello(std::uint32_t rank,
                                                   const ipc::Geometry& geometry,
                                                   ipc::CacheOwner owner = ipc::CacheOwner::kWorker,
                                                   const std::string& engine = "chat",
                                                   const std::string& link = "");
  /// What a rank with that epoch mapped reports.
  [[nodiscard]] static ipc::RankState mapped_state(std::uint32_t rank, std::uint64_t epoch = 1);
  /// Reports the arena (session of the rank, epoch) as mapped and ready.
  void report_mapped(std::uint32_t rank, std::uint64_t epoch);
  void report_cleared(std::uint32_t rank, std::uint64_t epoch);
  void finish(const ipc::MoverJob& job, ipc::ErrorCode* error = nullptr);

  // Everybody.
  template <typename T> void notify(ipc::MessageKind kind, const T& body) {
    ipc::Envelope envelope;
    envelope.kind = kind;
    envelope.body = ipc::encode(body);
    send(envelope);
  }
  template <typename T> void reply(const ipc::Envelope& request, const T& body) {
    ipc::Envelope envelope;
    envelope.kind = request.kind;
    envelope.request = request.request;
    envelope.is_reply = true;
    envelope.body = ipc::encode(body);
    send(envelope);
  }
  void reply_error(const ipc::Envelope& request, ipc::Error error);
  void send(const ipc::Envelope& envelope);
  /// Sends a request without waiting for its reply.
  template <typename T> ipc::RequestId ask(ipc::MessageKind kind, const T& body) {
    ipc::Envelope envelope;
    envelope.kind = kind;
    envelope.request = link_->next_request();
    envelope.body = ipc::encode(body);
    send(envelope);
    return envelope.request;
  }
  template <typename Reply, typename Request>
  [[nodiscard]] ipc::Result<Reply> call(ipc::MessageKind kind, const Request& body) {
    return link_->call<Reply>(kind, body, ipc::Deadline::after(std::chrono::seconds(20)));
  }
  /// The next message of the kind, request or reply; others are kept. Nothing at the deadline.
  [[nodiscard]] std::optional<ipc::Envelope> next(
      ipc::MessageKind kind,
      ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(20)));
  template <typename T> [[nodiscard]] ipc::Result<T> next_body(ipc::MessageKind kind) {
    const auto envelope = next(kind);
    if (!envelope) {
      return KVFERRY_ERROR(kTimeout, "no message of kind {} came", static_cast<int>(kind));
    }
    return ipc::decode<T>(envelope->body, "awaited message");
  }
  /// Waits until every message sent to this peer before now has come: asks the manager something
  /// that it answers in order, then tells whether one of the kind is here.
  [[nodiscard]] bool has(ipc::MessageKind kind);

  [[nodiscard]] static ipc::SessionId session_of(std::uint32_t rank) {
    return ipc::Digest::from_words(0x5E55, rank + 1);
  }

 private:
  void take_arrived();
  [[nodiscard]] std::optional<ipc::Envelope> take_kept(ipc::MessageKind kind);

  ipc::IncarnationId id_;
  std::unique_ptr<ipc::ControlLink> link_;
  std::deque<ipc::Envelope> kept_;
  ipc::ProcessKind kind_;
};

}  // namespace kvferry::test
