// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/weights_uploads.hpp"

#include "manager/rank_errors.hpp"

#include <chrono>
#include <memory>
#include <optional>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// A copy into memory, on every rank.
constexpr std::chrono::seconds kPartTime{15};

struct Round {
  ipc::Peer peer;
  ipc::Envelope request;  ///< Without its body.
  std::uint32_t pending = 0;
  std::optional<ipc::Error> error;
};

}  // namespace

ipc::Status WeightsUploads::check(const ipc::WeightsPart& part) {
  const std::uint64_t size = part.bytes.size();
  if (part.upload.is_zero()) {
    return KVFERRY_ERROR(kInvalidArgument, "zero names no upload: take random bytes");
  }
  if (size > ipc::WeightsPart::kMaxBytes || part.offset > part.total_bytes ||
      size > part.total_bytes - part.offset || (size == 0 && part.total_bytes > 0)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a part [{}, + {}) of {} bytes of weights: parts have 1 to {} bytes and "
                         "lie within the whole",
                         part.offset, size, part.total_bytes, ipc::WeightsPart::kMaxBytes);
  }
  return ipc::ok();
}

void WeightsUploads::pass_on(const ipc::Peer& peer,
                             const ipc::Envelope& request,
                             ipc::WeightsPart part,
                             const EngineRecord& engine) {
  part.engine = engine.name();
  if (part.total_bytes == 0) {
    senders_.erase(peer.id);
  } else {
    senders_.insert_or_assign(peer.id, Upload{part.engine, part.upload});
  }
  const auto round = std::make_shared<Round>();
  round->peer = peer;
  round->request = request;
  round->request.body.clear();
  round->pending = 1;  // Held until everything is sent.
  const auto answered = [this, round] {
    if (--round->pending > 0) return;
    if (round->error) {
      context_.refuse(round->peer, round->request, *round->error);
    } else {
      context_.reply(round->peer, round->request, ipc::Empty{});
    }
  };
  const auto& ranks = engine.ranks();
  for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
    const auto failed = [round, name = engine.name(), rank](const ipc::Error& error) {
      if (!round->error) round->error = in_rank(error, name, ipc::Rank{rank});
    };
    if (!ranks[rank].worker || !ranks[rank].worker->connected) {
      failed(KVFERRY_ERROR(kPeerDied, "it has no worker: start it, and send the weights again"));
      continue;
    }
    ++round->pending;
    context_.calls.call(ranks[rank].worker->id, ipc::MessageKind::kRankWeightsPart, part,
                        ipc::Deadline::after(kPartTime),
                        [answered, failed](const ipc::Result<ipc::Envelope>& answer) {
                          if (!answer) failed(answer.error());
                          answered();
                        });
  }
  answered();
}

void WeightsUploads::on_peer_gone(const ipc::IncarnationId& peer) {
  const auto sender = senders_.extract(peer);
  if (!sender.empty()) forget(sender.mapped());
}

// Told, not asked: a rank that does not hear it forgets it with the next upload.
void WeightsUploads::forget(const Upload& upload) {
  const EngineRecord* const engine = context_.directory.find(upload.engine);
  if (engine == nullptr) return;
  ipc::WeightsPart nothing;
  nothing.engine = upload.engine;
  nothing.upload = upload.upload;
  for (const RankRecord& rank : engine->ranks()) {
    if (!rank.worker) continue;
    context_.calls.call(rank.worker->id, ipc::MessageKind::kRankWeightsPart, nothing,
                        ipc::Deadline::after(kPartTime), [](const auto& /*answer*/) {});
  }
}

}  // namespace kvferry::cache_manager
