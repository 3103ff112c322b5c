// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// One more rank of broadcast_conformance_test. Arguments: DEVICE RANK RANKS ID, the latter in hex.
// It joins, and then does what stdin says: "take SIZE SEED" takes part in a broadcast of so many
// bytes and looks at them, "enqueue SIZE" takes part and looks at nothing.
#include "device/broadcast_bytes.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "support/child_side.hpp"

#include <atomic>
#include <chrono>
#include <exception>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

namespace {

using namespace kvferry::ipc;
using kvferry::test::hear;
using kvferry::test::say;

int run(const std::string& device_text, BroadcastSeat seat) {
  auto spec = DeviceSpec::parse(device_text);
  if (!spec) return 2;
  const auto device = open_device(*spec);
  const auto memory = device->allocate(kvferry::test::kBroadcastBytes, HandleKind::kVmm, nullptr);
  auto stream = device->make_stream(StreamPriority::kNormal);
  auto buffer = device->make_pinned_buffer(kvferry::test::kBroadcastBytes);
  if (!memory || !stream || !buffer) return 3;
  const std::atomic<bool> cancelled{false};
  const auto wait = [&cancelled] {
    return BroadcastWait{Deadline::after(std::chrono::seconds(30)), cancelled};
  };
  auto group = device->join_broadcast(seat, wait());
  if (!group) {
    say(group.error().to_string());
    return 4;
  }
  say("joined");
  while (const auto line = hear()) {
    std::istringstream words(*line);
    std::string verb;
    std::uint64_t size = 0;
    std::uint64_t seed = 0;
    words >> verb >> size >> seed;
    const Status sent = (*group)->broadcast(**stream, (*memory)->address(), size, wait());
    if (!sent) {
      say(sent.error().to_string());
    } else if (verb == "enqueue") {
      say("enqueued");
    } else {
      say(kvferry::test::look_at(**stream, **group, **memory, **buffer, size, seed));
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  try {
    return run(argv[1],
               {kvferry::test::id_of(argv[4]), static_cast<std::uint32_t>(std::stoul(argv[2])),
                static_cast<std::uint32_t>(std::stoul(argv[3])), nullptr});
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
