// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_steps.hpp"

#include "must.hpp"

#include <algorithm>

namespace kvferry::cli {

BenchSteps::BenchSteps(BenchInstance& instance,
                       worker::Client& client,
                       const ipc::RuntimeDir& dir,
                       const std::string& engine,
                       std::uint32_t ranks)
    : instance_(instance), client_(client) {
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    channels_.emplace_back(instance.loop(), dir, engine, ipc::Rank{rank}, "bench",
                           worker::StepChannel::Hooks{[] {}, [] {}});
  }
  const auto all_up = [this] {
    return std::all_of(channels_.begin(), channels_.end(),
                       [](const worker::StepChannel& channel) { return channel.is_up(); });
  };
  must(instance_.run_until(all_up, "the workers' step channels"));
}

void BenchSteps::send(ipc::Step step) {
  const worker::CacheState& state = client_.state();
  std::uint32_t rank = 0;
  for (worker::StepChannel& channel : channels_) {
    step.session = state.ranks.at(rank).session;
    step.epoch = state.ranks.at(rank).epoch;
    ++rank;
    ++running_;
    must(channel.send(step, [this](const ipc::Result<ipc::StepReply>& reply) {
      --running_;
      instance_.note_progress();
      if (!reply) {
        failed_ = reply.error();
      } else if (std::any_of(reply->mismatches.begin(), reply->mismatches.end(),
                             [](std::uint64_t words) { return words != 0; })) {
        failed_ = KVFERRY_ERROR(kSystem, "a block held other bytes than it should");
      }
    }));
  }
}

}  // namespace kvferry::cli
