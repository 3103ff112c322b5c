// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/weights_commands.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "rank/reply_to.hpp"

#include <exception>
#include <utility>

namespace kvferry::ipc {

Digest WeightsCommands::id() const {
  const std::lock_guard lock(mutex_);
  return id_;
}

void WeightsCommands::interrupt(const Envelope& request) noexcept {
  const auto order = decode<RankWeights>(request.body, "RankWeights");
  if (order && order->phase == WeightsPhase::kAbandon) cancel();
}

void WeightsCommands::cancel() noexcept {
  if (user_ != nullptr) user_->cancel();
}

void WeightsCommands::abandon() {
  prepared_ = 0;
  forget_images();
  if (user_ == nullptr) return;
  try {
    user_->abandon();
  } catch (const std::exception& error) {
    log_error("weights: what was prepared is not let go: {}", error.what());
  }
}

Envelope WeightsCommands::run(const Envelope& request) {
  Envelope reply = reply_to(request);
  if (const Status answered = answer_safely(request, reply); !answered) {
    log_warn("weights: {}", answered.error().to_string());
    reply.error = answered.error();
  }
  return reply;
}

Status WeightsCommands::answer_safely(const Envelope& request, Envelope& reply) {
  try {
    return answer(request, reply);
  } catch (const std::exception& error) {
    return KVFERRY_ERROR(kSystem, "the engine's weights could not be changed: {}", error.what());
  }
}

Status WeightsCommands::answer(const Envelope& request, Envelope& reply) {
  if (request.kind == MessageKind::kRankWeightsPart) {
    KVFERRY_TRY(take_part(request));
    reply.body = encode(Empty{});
  } else if (request.kind == MessageKind::kRankWeightsRead) {
    KVFERRY_ASSIGN(const auto part, read_part(request));
    reply.body = encode(part);
  } else if (request.kind == MessageKind::kRankBroadcast) {
    KVFERRY_ASSIGN(const auto found, look_or_open(request));
    reply.body = encode(found);
  } else {
    KVFERRY_ASSIGN(const auto outcome, obey(request));
    reply.body = encode(outcome);
  }
  return ok();
}

void WeightsCommands::set_id(const Digest& id) {
  const std::lock_guard lock(mutex_);
  id_ = id;
}

Status WeightsCommands::take_part(const Envelope& request) {
  KVFERRY_ASSIGN(const auto part, decode<WeightsPart>(request.body, "WeightsPart"));
  return upload_.take(part);
}

Result<WeightsPart> WeightsCommands::read_part(const Envelope& request) {
  KVFERRY_ASSIGN(const auto wanted, decode<RankWeightsRead>(request.body, "RankWeightsRead"));
  return whole_.read(wanted);
}

void WeightsCommands::forget_images() {
  upload_.drop();
  whole_.drop();
}

/// Where this rank finds what the order names.
Result<WeightsSource> WeightsCommands::locate(const WeightsSource& ordered) const {
  switch (ordered.from) {
    case WeightsFrom::kDisk: return ordered;
    case WeightsFrom::kTensors: {
      KVFERRY_ASSIGN(std::string image, upload_.complete(ordered.location));
      return WeightsSource{WeightsFrom::kTensors, std::move(image)};
    }
    case WeightsFrom::kIpc: {
      KVFERRY_ASSIGN(const auto socket,
                     dir_.weights_socket(lender_of(ordered.location, rank_.value)));
      return WeightsSource{WeightsFrom::kIpc, socket.string()};
    }
    case WeightsFrom::kDistributed: {
      KVFERRY_ASSIGN(std::string image, whole_.location(upload_, ordered.location));
      return WeightsSource{WeightsFrom::kDisk, std::move(image)};
    }
  }
  return KVFERRY_ERROR(kProtocol, "weights from source {}", static_cast<int>(ordered.from));
}

Result<RankBroadcastReply> WeightsCommands::look_or_open(const Envelope& request) {
  KVFERRY_ASSIGN(const auto order, decode<RankBroadcast>(request.body, "RankBroadcast"));
  KVFERRY_TRY(check_user());
  RankBroadcastReply reply;
  if (order.phase == BroadcastPhase::kLook) {
    // Of an update that was never ended: it would take what is opened now with it.
    if (std::exchange(prepared_, 0) != 0) user_->abandon();
    KVFERRY_ASSIGN(reply.port, user_->broadcast_port());
  } else {
    KVFERRY_ASSIGN(reply.id, user_->open_broadcast(order.file, order.again));
  }
  return reply;
}

Status WeightsCommands::check_user() const {
  if (user_ != nullptr) return ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "this worker has no weights to update: register it with "
                       "WorkerHooks::weights, or start it with --weights");
}

Result<std::uint64_t> WeightsCommands::prepare(const RankWeights& order) {
  const Deadline deadline = Deadline::after(order.deadline);
  if (!order.broadcast.empty()) return user_->prepare_broadcast(order.broadcast, deadline);
  KVFERRY_ASSIGN(const WeightsSource source, locate(order.source));
  return user_->prepare(source, deadline);
}

Result<RankWeightsReply> WeightsCommands::obey(const Envelope& request) {
  KVFERRY_ASSIGN(const auto order, decode<RankWeights>(request.body, "RankWeights"));
  KVFERRY_TRY(check_user());
  RankWeightsReply reply;
  if (order.phase == WeightsPhase::kPrepare) {
    if (std::exchange(prepared_, 0) != 0) user_->abandon();
    log_info("weights: update {} prepares from {} {}{}", order.update, to_string(order.source.from),
             order.source.location, order.broadcast.empty() ? "" : ", which rank 0 broadcasts");
    KVFERRY_ASSIGN(reply.bytes, prepare(order));
    prepared_ = order.update;
  } else if (order.phase == WeightsPhase::kAbandon) {
    prepared_ = 0;
    user_->abandon();
    forget_images();
  } else {
    if (prepared_ != order.update || prepared_ == 0) {
      return KVFERRY_ERROR(kStaleEpoch,
                           "update {} is to be committed, prepared is {}: ask for the update again",
                           order.update, prepared_);
    }
    prepared_ = 0;
    log_info("weights: {} take the place of {}", order.weights.hex(), id().hex());
    set_id(Digest::random());  // Half of each, should it fail: known by no name of before.
    forget_images();           // What is prepared needs it no more.
    KVFERRY_TRY(user_->commit(Deadline::after(order.deadline)));
    set_id(order.weights);
    lost_.store(false);
  }
  reply.weights = id();
  return reply;
}

}  // namespace kvferry::ipc
