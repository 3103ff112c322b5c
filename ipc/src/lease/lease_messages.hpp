// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// Packets of the lease socket. Each starts with an 8-byte header that no version may change:
///
///     offset 0  u8   message (LeaseMessage)
///            1  u8   0, three times
///            4  u32  kLeaseProtocolVersion of the sender, little-endian
///            8       body: msgpack array of the struct's fields
///
/// A peer of another version is thus told so in words it can read (Refused's body is one Error,
/// in every version). Messages are doorbells and carriers of handles; the shared words are the
/// truth.
namespace kvferry::ipc::lease {

enum class LeaseMessage : std::uint8_t {
  kHello = 1,  ///< Attacher: who I am. One descriptor: its words.
  kWelcome,    ///< Owner: who I am, the session. One descriptor: its words.
  kRefused,    ///< Either side of a hello: why not; the sender closes.
  kAttach,     ///< Attacher: grant me the first epoch that is at least this.
  kGrant,      ///< Owner: a lease, with handles; in parts when they are many.
  kRevoke,     ///< Owner's doorbell: look at the owner word.
  kReleased,   ///< Attacher's doorbell: look at my released word.
  kBye,        ///< Attacher: I end. Answered in kind with the last lease granted.
  kPrepared,   ///< Attacher's doorbell: look at my prepared word.
};

struct HelloBody {
  LeaseIdentity identity;
  template <typename V> void visit(V& v) {
    v(identity.instance, identity.engine, identity.rank, identity.ranks, identity.self,
      identity.cache_owner, identity.handles, identity.fingerprint, identity.incarnation);
  }
};

struct WelcomeBody {
  HelloBody owner;
  SessionId session;
  /// Last lease that this incarnation was ever granted: it holds nothing now, so it acknowledges
  /// all up to this one. Ends a grant that was lost with an earlier connection.
  LeaseId last_lease;
  template <typename V> void visit(V& v) { v(owner, session, last_lease); }
};

struct RefusedBody {
  Error error;
  template <typename V> void visit(V& v) { v(error); }
};

struct AttachBody {
  Epoch min_epoch;
  template <typename V> void visit(V& v) { v(min_epoch); }
};

struct WireHandle {
  HandleKind kind = HandleKind::kVmm;
  std::uint64_t size_bytes = 0;
  Bytes token;
  bool has_fd = false;
  template <typename V> void visit(V& v) { v(kind, size_bytes, token, has_fd); }
};

/// Part of a grant: handles [first, first + handles.size()) of total. The layout comes with the
/// first part. prepared: the lease under which the memory was zeroed (0: by the owner); nothing:
/// whoever gets this grant has to.
struct GrantBody {
  Epoch epoch;
  LeaseId lease;
  std::optional<LeaseId> prepared;
  std::uint32_t total = 0;
  std::uint32_t first = 0;
  std::vector<WireHandle> handles;
  std::optional<ArenaLayout> layout;
  template <typename V> void visit(V& v) {
    v(epoch, lease, prepared, total, first, handles, layout);
  }
};

struct RevokeBody {
  Epoch epoch;
  template <typename V> void visit(V& v) { v(epoch); }
};

/// Of Released, Prepared and Bye.
struct LeaseBody {
  LeaseId lease;
  template <typename V> void visit(V& v) { v(lease); }
};

inline constexpr std::size_t kHeaderBytes = 8;
/// Handles per part: room for the descriptors of one packet.
inline constexpr std::uint32_t kMaxHandlesPerPart = PacketSocket::kMaxFds;
inline constexpr std::uint32_t kMaxHandles = 4096;
inline constexpr std::size_t kMaxTokenBytes = 256;
/// An encoded layout must leave room for header and handles in the first part.
inline constexpr std::size_t kMaxLayoutBytes = PacketSocket::kMaxPacketBytes - 32UL * 1024;

/// A packet whose header was read. The body is not decoded yet.
struct Incoming {
  LeaseMessage message = LeaseMessage::kHello;
  std::uint32_t version = 0;
  Packet packet;

  [[nodiscard]] std::span<const std::uint8_t> body() const {
    return std::span(packet.bytes).subspan(kHeaderBytes);
  }
};

/// kProtocol for a short packet or an unknown message. Another version is only an error for what
/// is neither Hello nor Refused.
[[nodiscard]] Result<Incoming> read_header(Packet packet);

[[nodiscard]] Status send_packet(PacketSocket& socket,
                                 LeaseMessage message,
                                 const Bytes& body,
                                 std::span<const int> fds = {});

template <typename T>
[[nodiscard]] Status send(PacketSocket& socket,
                          LeaseMessage message,
                          const T& body,
                          std::span<const int> fds = {}) {
  return send_packet(socket, message, encode(body), fds);
}

/// Decodes the body; kProtocol unless exactly fd_count descriptors came along.
template <typename T>
[[nodiscard]] Result<T> read_body(const Incoming& incoming,
                                  const char* name,
                                  std::size_t fd_count = 0) {
  if (incoming.packet.fds.size() != fd_count) {
    return KVFERRY_ERROR(kProtocol, "{} came with {} descriptors, expected {}", name,
                         incoming.packet.fds.size(), fd_count);
  }
  return decode<T>(incoming.body(), name);
}

}  // namespace kvferry::ipc::lease
