// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// New weights that rank 0 alone reads: asked of it part by part, and each handed to the other ranks
// before the next one is asked for. Nothing is kept here, and no rank prepares before all have all.
#include "manager/generation_operations.hpp"
#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"
#include "manager/weights_uploads.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using std::chrono_literals::operator""ms;

/// What rank 0 says has to be what it was asked for: it is passed on.
ipc::Result<ipc::WeightsPart> part_of(const ipc::Result<ipc::Envelope>& answer,
                                      const ipc::RankWeightsRead& wanted) {
  if (!answer) return answer.error();
  KVFERRY_ASSIGN(auto part, ipc::decode<ipc::WeightsPart>(answer->body, "WeightsPart"));
  KVFERRY_TRY(WeightsUploads::check(part));
  if (part.upload != wanted.upload || part.offset != wanted.offset || part.bytes.empty()) {
    return KVFERRY_ERROR(
        kProtocol, "it answered with {} bytes at {} of weights {}, asked for was {} of {}",
        part.bytes.size(), part.offset, part.upload.hex(), wanted.offset, wanted.upload.hex());
  }
  return part;
}

}  // namespace

void GenerationOperations::distribute_weights(const OperationRef& operation,
                                              std::function<void()> next) {
  const ipc::RankWeightsRead first{ipc::Digest::random(), operation->weights.source.location, 0};
  operation->weights.source.location = first.upload.hex();
  const ipc::TimePoint prepared_by = ipc::MonotonicClock::now() + operation->weights.deadline;
  read_for_ranks(operation, first, [operation, prepared_by, next = std::move(next)] {
    // What is left of the time for both.
    operation->weights.deadline = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(
                                               prepared_by - ipc::MonotonicClock::now()),
                                           1ms);
    next();
  });
}

void GenerationOperations::read_for_ranks(const OperationRef& operation,
                                          const ipc::RankWeightsRead& wanted,
                                          const std::function<void()>& next) {
  const auto part = std::make_shared<ipc::WeightsPart>();
  operation->next = [this, operation, wanted, part, next] {
    const std::uint64_t end = part->offset + part->bytes.size();
    if (operation->error || operation->engine->ranks().size() == 1) {
      next();
      return;
    }
    hand_to_ranks(operation, *part,
                  [this, operation, wanted, next, end, total = part->total_bytes] {
                    if (operation->error || end == total) {
                      next();
                      return;
                    }
                    ipc::RankWeightsRead rest = wanted;
                    rest.offset = end;
                    read_for_ranks(operation, rest, next);
                  });
  };
  operation->pending = 1;  // Held until it is sent.
  ask_rank(operation, 0, ipc::MessageKind::kRankWeightsRead, wanted,
           [operation = operation.get(), wanted, part](std::uint32_t rank,
                                                       const ipc::Result<ipc::Envelope>& answer) {
             if (auto read = part_of(answer, wanted); read) {
               *part = std::move(read).value();
             } else {
               operation->updates[rank].error =
                   in_rank(read.error(), operation->engine->name(), ipc::Rank{rank});
             }
           });
  end_round(operation);
}

void GenerationOperations::hand_to_ranks(const OperationRef& operation,
                                         const ipc::WeightsPart& part,
                                         std::function<void()> next) {
  operation->next = std::move(next);
  operation->pending = 1;  // Held until everything is sent.
  const auto ranks = static_cast<std::uint32_t>(operation->engine->ranks().size());
  for (std::uint32_t rank = 1; rank < ranks; ++rank) {
    ask_rank(operation, rank, ipc::MessageKind::kRankWeightsPart, part,
             [operation = operation.get()](std::uint32_t asked,
                                           const ipc::Result<ipc::Envelope>& answer) {
               if (answer) return;
               operation->updates[asked].error =
                   in_rank(answer.error(), operation->engine->name(), ipc::Rank{asked});
             });
  }
  end_round(operation);
}

}  // namespace kvferry::cache_manager
