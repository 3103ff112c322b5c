// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// An engine's process: layers_load_child RUNTIME_DIR GEOMETRY ORDER WEIGHTS FIRST COUNT SLOT SEED
// sends a step that reads COUNT blocks of each group by layers, asks for the load that brings them,
// says "asked USE", and waits to be killed. ORDER: block-first or layer-first; WEIGHTS: hex.
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "support/child_process.hpp"
#include "support/child_side.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  using namespace kvferry;
  if (argc != 9) return 2;
  const std::string dir = argv[1];
  const ipc::Geometry geometry = ipc::load_geometry(argv[2], 1).value();
  const auto number = [argv](int index) { return std::stoull(argv[index]); };
  const auto first = static_cast<std::uint32_t>(number(5));
  const auto count = static_cast<std::uint32_t>(number(6));
  worker::ClientOptions options;
  options.runtime_dir = dir;
  options.identity.model = geometry.name;
  options.identity.fingerprint =
      geometry.fingerprint(argv[3] == std::string("block-first") ? ipc::ArenaOrder::kBlockFirst
                                                                 : ipc::ArenaOrder::kLayerFirst);
  const std::string weights = argv[4];
  for (std::size_t i = 0; i < options.identity.weights.bytes.size(); ++i) {
    options.identity.weights.bytes.at(i) =
        static_cast<std::uint8_t>(std::stoi(weights.substr(2 * i, 2), nullptr, 16));
  }
  auto connected = worker::Client::connect(options, test::soon());
  if (!connected) return 3;
  worker::Client& client = **connected;
  if (!client.wait_ready(true, test::soon())) return 4;
  ipc::EventLoop loop;
  worker::StepChannel channel(loop, ipc::RuntimeDir::open(dir, "default").value(), "default",
                              ipc::Rank{0}, "doomed", worker::StepChannel::Hooks{[] {}, [] {}});
  while (!channel.is_up()) loop.run_once(ipc::Deadline::after(std::chrono::milliseconds(20)));

  ipc::Step step;
  step.session = client.state().ranks.at(0).session;
  step.epoch = client.state().ranks.at(0).epoch;
  step.awaits = client.layer_ticket(static_cast<std::uint32_t>(number(7)));
  step.patience = std::chrono::minutes(5);
  std::vector<worker::LoadItem> items;
  for (std::uint32_t group = 0; group < geometry.groups.size(); ++group) {
    for (std::uint32_t i = 0; i < count; ++i) {
      step.verifies.push_back({ipc::GroupId{group}, ipc::BlockId{first + i},
                               number(8) + group * std::uint64_t{1000} + i});
      ipc::Digest hash;
      hash.bytes.at(0) = static_cast<std::uint8_t>(i);
      hash.bytes.at(1) = 1;
      items.push_back({ipc::GroupId{group}, ipc::BlockId{first + i}, hash});
    }
  }
  // Answered in their order: the step has begun then.
  if (!channel.send(step, [](const auto&) { test::say("ended"); }) ||
      !channel.ask_memory([&](const auto&) {
        if (client.submit_load(items, 1, step.awaits)) {
          test::say(fmt::format("asked {}", step.awaits->use));
        }
      })) {
    return 5;
  }
  for (;;) {
    loop.run_once(ipc::Deadline::after(std::chrono::seconds(1)));
    (void)client.poll(1);
  }
}
