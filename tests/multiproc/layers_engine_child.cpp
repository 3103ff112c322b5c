// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// An engine's process: layers_engine_child RUNTIME_DIR HEX sends the step of those bytes to rank 0,
// says "begun" when the worker has begun it, and waits to be killed.
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "support/child_side.hpp"

#include <string>

int main(int argc, char** argv) {
  using namespace kvferry;
  if (argc != 3) return 2;
  ipc::Bytes bytes;
  const std::string hex = argv[2];
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  const auto step = ipc::decode<ipc::Step>(bytes, "Step");
  if (!step) return 3;
  ipc::EventLoop loop;
  worker::StepChannel channel(loop, ipc::RuntimeDir::open(argv[1], "default").value(), "default",
                              ipc::Rank{0}, "doomed", worker::StepChannel::Hooks{[] {}, [] {}});
  while (!channel.is_up()) loop.run_once(ipc::Deadline::after(std::chrono::milliseconds(20)));
  // Answered in their order: the step has begun then.
  if (!channel.send(*step, [](const auto&) { test::say("ended"); }) ||
      !channel.ask_memory([](const auto&) { test::say("begun"); })) {
    return 4;
  }
  for (;;) loop.run_once(ipc::Deadline::after(std::chrono::seconds(1)));
}
