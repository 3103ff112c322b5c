// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The other process of device_conformance_test: imports the memory whose handle comes over
// descriptor 3 and does what stdin says. Arguments: DEVICE HANDLE_KIND.
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "support/child_side.hpp"

#include <poll.h>

#include <cstring>
#include <iostream>
#include <string>

namespace {

using namespace kvferry::ipc;
using kvferry::test::hear;
using kvferry::test::say;

// The last MiB of the memory: read, inverted, written back.
bool invert(Device& device, const DeviceMemory& memory) {
  constexpr std::uint64_t kSize = 1ULL << 20;
  auto stream = device.make_stream(StreamPriority::kNormal);
  auto buffer = device.make_pinned_buffer(kSize);
  if (!stream || !buffer) return false;
  const CopyOp op{(*buffer)->data(), memory.address() + (memory.size_bytes() - kSize), kSize};
  for (const CopyDirection direction :
       {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
    const EventFd done;
    if (!(*stream)->copy(direction, {&op, 1}, CopyMode::kEach)) return false;
    if (!(*stream)->notify(done.fd())) return false;
    pollfd waited{done.fd(), POLLIN, 0};
    if (::poll(&waited, 1, 20'000) != 1) return false;
    if (!(*stream)->query()) return false;  // orders memory, which the eventfd does not promise
    if (direction == CopyDirection::kDeviceToHost) {
      for (std::uint64_t i = 0; i < kSize; ++i) (*buffer)->data()[i] ^= std::byte{0xFF};
    }
  }
  return true;
}

int run(const std::string& device_text, const std::string& kind_text) {
  auto spec = DeviceSpec::parse(device_text);
  if (!spec) return 2;
  const auto device = open_device(*spec);
  PacketSocket socket{UniqueFd(3)};
  auto packet = socket.receive(Deadline::after(std::chrono::seconds(20)));
  if (!packet || packet->bytes.size() < 8) return 3;
  ExportedHandle handle;
  handle.kind = kind_text == to_string(HandleKind::kVmm) ? HandleKind::kVmm : HandleKind::kLegacy;
  std::memcpy(&handle.size_bytes, packet->bytes.data(), 8);
  handle.token.assign(packet->bytes.begin() + 8, packet->bytes.end());
  if (!packet->fds.empty()) handle.fd = std::move(packet->fds.front());
  auto memory = device->import(std::move(handle), nullptr);
  if (!memory) {
    std::cerr << memory.error().to_string() << '\n';
    return 4;
  }
  say("mapped");
  while (const auto line = hear()) {
    if (*line == "invert") {
      if (!invert(*device, **memory)) return 5;
      say("inverted");
    } else if (*line == "close") {
      if (!(*memory)->release()) return 6;
      say("closed");
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
