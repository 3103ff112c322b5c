// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/first_epoch.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <chrono>
#include <string>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kFirstInit = std::chrono::seconds(60);
// Nothing tells when device memory comes back: it is asked for again.
constexpr auto kFirstInitRetry = std::chrono::milliseconds(250);

/// Memory that an earlier life's peers still pin comes back when they let go or end.
bool may_come_back(ErrorCode code) noexcept {
  return code == ErrorCode::kNoDeviceMemory || code == ErrorCode::kQuarantined;
}

}  // namespace

FirstEpoch::FirstEpoch(LoopCalls& calls,
                       LifecycleThread& lifecycle,
                       RankLease& lease,
                       std::function<void(const Error&)> on_failed)
    : calls_(calls), lifecycle_(lifecycle), lease_(lease), on_failed_(std::move(on_failed)) {}

FirstEpoch::~FirstEpoch() {
  if (timer_ != 0) calls_.loop().cancel(timer_);
}

void FirstEpoch::start() {
  const Deadline deadline = Deadline::after(kFirstInit);
  auto epoch = lease_.init(deadline);
  if (epoch) return;
  if (!may_come_back(epoch.error().code) || !lease_.fits_device()) {
    throw Exception(std::move(epoch).error());
  }
  await_memory(deadline, epoch.error());
}

void FirstEpoch::await_memory(Deadline deadline, const Error& why) {
  if (!awaited_) {
    awaited_ = MonotonicClock::now();
    log_warn("rank {}: the first epoch waits at most {} s for device memory: {}",
             lease_.rank().value, kFirstInit.count(), why.to_string());
  }
  if (deadline.expired()) {
    on_failed_(why);
    return;
  }
  timer_ = calls_.loop().after(kFirstInitRetry, [this, deadline] {
    timer_ = 0;
    lifecycle_.post([this, deadline] {
      if (lease_.view().epoch.value > 0) return;  // a re-init of the manager was first
      calls_.post([this, deadline, epoch = lease_.init(deadline)] { on_tried(deadline, epoch); });
    });
  });
}

void FirstEpoch::on_tried(Deadline deadline, const Result<Epoch>& epoch) {
  if (!epoch && may_come_back(epoch.error().code)) {
    await_memory(deadline, epoch.error());
    return;
  }
  log_info("rank {}: the wait for device memory ended after {} ms: {}", lease_.rank().value,
           std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() - *awaited_)
               .count(),
           epoch ? std::string("mapped") : epoch.error().to_string());
  if (!epoch) on_failed_(epoch.error());
}

}  // namespace kvferry::ipc
