// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Packets of the lease socket: the header, then the body that it announces, with none to two
// descriptors.
#include "lease/lease_messages.hpp"

#include "fuzz.hpp"
#include "lease/hello.hpp"

#include <fcntl.h>

namespace kvferry::fuzz {
namespace {

using namespace ipc::lease;

ipc::LeaseIdentity owner() {
  ipc::LeaseIdentity identity;
  identity.instance = "default";
  identity.engine = "chat";
  identity.self = ipc::ProcessKind::kWorker;
  return identity;
}

template <typename T> ipc::Result<T> read(const Incoming& incoming, std::size_t fds = 0) {
  auto body = read_body<T>(incoming, "fuzzed body", fds);
  if (body) round_trip(*body);
  return body;
}

void read(const Incoming& incoming) {
  switch (incoming.message) {
    case LeaseMessage::kHello:
      if (const auto hello = read<HelloBody>(incoming, 1)) {
        (void)compare_identities(owner(), 1, hello->identity, 2);
        (void)compare_roles(owner(), 1, hello->identity, 2);
      }
      return;
    case LeaseMessage::kWelcome: (void)read<WelcomeBody>(incoming, 1); return;
    case LeaseMessage::kRefused:
      if (const auto refused = read<RefusedBody>(incoming)) {
        (void)is_permanent(refused->error);
        (void)refused->error.to_string();
      }
      return;
    case LeaseMessage::kAttach: (void)read<AttachBody>(incoming); return;
    case LeaseMessage::kGrant: (void)read<GrantBody>(incoming, incoming.packet.fds.size()); return;
    case LeaseMessage::kRevoke: (void)read<RevokeBody>(incoming); return;
    case LeaseMessage::kReleased:
    case LeaseMessage::kPrepared:
    case LeaseMessage::kBye: (void)read<LeaseBody>(incoming); return;
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  ipc::Packet packet;
  for (int fds = input.byte() % 3; fds > 0; --fds) {
    packet.fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  const auto bytes = input.rest();
  packet.bytes.assign(bytes.begin(), bytes.end());
  if (const auto incoming = ipc::lease::read_header(std::move(packet))) fuzz::read(*incoming);
  return 0;
}
