// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/rollouts.hpp"

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

constexpr ipc::Duration kAskAgain = 20ms;

}  // namespace

Rollouts::Rollouts(ipc::EventLoop& loop,
                   worker::GenerationChannel& channel,
                   const std::vector<ipc::Generate>& prompts,
                   Hooks hooks)
    : loop_(loop), channel_(channel), prompts_(prompts), hooks_(std::move(hooks)) {}

Rollouts::~Rollouts() { loop_.cancel(timer_); }

void Rollouts::submit(std::uint32_t iteration, const std::vector<std::size_t>& prompts) {
  for (const std::size_t prompt : prompts) queue_.push_back({iteration, prompt});
  outstanding_[iteration] += prompts.size();
  submitted_ += prompts.size();
  if (!waits_) send_queued();
}

void Rollouts::send_queued() {
  while (!queue_.empty()) {
    const Request request = queue_.front();
    const auto sent = channel_.submit(
        prompts_[request.prompt],
        [this, request](const ipc::Result<ipc::GenerateReply>& reply) { on_done(request, reply); });
    if (!sent && sent.error().code == ipc::ErrorCode::kBusy) return try_again();
    if (!sent) return hooks_.on_failed(sent.error());
    queue_.pop_front();
  }
}

void Rollouts::on_done(const Request& request, const ipc::Result<ipc::GenerateReply>& reply) {
  if (!reply && reply.error().code == ipc::ErrorCode::kBusy) {
    queue_.push_back(request);
    if (!waits_) try_again();
    return;
  }
  if (!reply) return hooks_.on_failed(reply.error());
  const auto count = outstanding_.find(request.iteration);
  if (--count->second == 0) outstanding_.erase(count);
  hooks_.on_answer(request.iteration, request.prompt, *reply);
}

void Rollouts::try_again() {
  waits_ = true;
  timer_ = loop_.after(kAskAgain, [this] {
    waits_ = false;
    send_queued();
  });
}

std::size_t Rollouts::outstanding(std::uint32_t iteration) const {
  const auto count = outstanding_.find(iteration);
  return count == outstanding_.end() ? 0 : count->second;
}

std::size_t Rollouts::outstanding_until(std::uint32_t iteration) const {
  std::size_t sum = 0;
  for (auto count = outstanding_.begin(); count != outstanding_.end() && count->first <= iteration;
       ++count) {
    sum += count->second;
  }
  return sum;
}

}  // namespace kvferry::cli
