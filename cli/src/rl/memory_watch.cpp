// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/memory_watch.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// A worker answers between two passes, at once.
constexpr ipc::Duration kLookTime = 10s;

}  // namespace

MemoryWatch::MemoryWatch(ipc::EventLoop& loop,
                         const ipc::RuntimeDir& dir,
                         const std::string& engine,
                         std::uint32_t ranks,
                         const std::function<void()>& on_change)
    : loop_(loop) {
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    channels_.push_back(
        std::make_unique<worker::StepChannel>(loop_, dir, engine, ipc::Rank{rank}, "rl-loop",
                                              worker::StepChannel::Hooks{on_change, on_change}));
  }
}

MemoryWatch::~MemoryWatch() { loop_.cancel(timer_); }

std::vector<std::uint32_t> MemoryWatch::missing() const {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t rank = 0; rank < channels_.size(); ++rank) {
    if (!channels_[rank]->is_up()) ranks.push_back(rank);
  }
  return ranks;
}

void MemoryWatch::look(Done done) {
  KVFERRY_CHECK(done_ == nullptr, "one look at a time");
  ++look_;
  answers_.assign(channels_.size(), std::nullopt);
  done_ = std::move(done);
  timer_ = loop_.after(kLookTime, [this] { give_up(); });
  for (std::size_t rank = 0; rank < channels_.size(); ++rank) {
    const auto sent = channels_[rank]->ask_memory(
        [this, look = look_, rank](ipc::Result<ipc::WorkerMemory> answer) {
          on_answer(look, rank, std::move(answer));
        });
    if (sent) continue;
    // Not from within look(): nobody expects to be called back there.
    loop_.cancel(timer_);
    timer_ = loop_.after(ipc::Duration::zero(), [this, error = sent.error()] { finish(error); });
    return;
  }
}

void MemoryWatch::on_answer(std::uint64_t look,
                            std::size_t rank,
                            ipc::Result<ipc::WorkerMemory> answer) {
  if (look != look_ || done_ == nullptr) return;
  if (!answer) return finish(std::move(answer).error());
  answers_[rank] = std::move(*answer);
  std::vector<ipc::WorkerMemory> all;
  for (const auto& each : answers_) {
    if (!each) return;
    all.push_back(*each);
  }
  finish(std::move(all));
}

void MemoryWatch::give_up() {
  std::vector<std::size_t> silent;
  for (std::size_t rank = 0; rank < answers_.size(); ++rank) {
    if (!answers_[rank]) silent.push_back(rank);
  }
  finish(KVFERRY_ERROR(kTimeout, "no word about their memory from the workers of ranks {} in {} s",
                       fmt::join(silent, ", "), kLookTime / 1s));
}

void MemoryWatch::finish(ipc::Result<std::vector<ipc::WorkerMemory>> result) {
  loop_.cancel(timer_);
  if (done_ != nullptr) std::exchange(done_, nullptr)(std::move(result));
}

}  // namespace kvferry::cli
