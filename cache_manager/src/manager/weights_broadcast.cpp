// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// How new weights that rank 0 alone reads come to the other ranks: by a broadcast between the
// ranks' devices where each rank has a device of its own and all of them reach each other, else in
// messages (weights_distribution.cpp).
#include "manager/generation_operations.hpp"
#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

using std::chrono_literals::operator""ms;

namespace {

constexpr const char* kMessages = "messages";

using Ports = std::vector<std::optional<ipc::BroadcastPort>>;

/// Nothing when they form a group; else why they do not. Ports of all ranks.
std::optional<std::string> hindrance(const Ports& ports) {
  for (std::size_t rank = 1; rank < ports.size(); ++rank) {
    if (ports[rank]->transport != ports[0]->transport) {
      return fmt::format("rank 0 has {}, rank {} {}", ports[0]->transport, rank,
                         ports[rank]->transport);
    }
    for (std::size_t other = 0; other < rank; ++other) {
      if (ports[rank]->device == ports[other]->device) {
        return fmt::format("ranks {} and {} share device {}", other, rank, ports[rank]->device);
      }
    }
  }
  return std::nullopt;
}

/// Whether all ranks have the same group from before. Ports of all ranks.
bool have_kept_one(const Ports& ports) {
  return !ports[0]->group.is_zero() &&
         std::all_of(ports.begin(), ports.end(),
                     [&](const auto& port) { return port->group == ports[0]->group; });
}

}  // namespace

void GenerationOperations::hand_weights_on(const OperationRef& operation,
                                           std::function<void()> next) {
  operation->transport = kMessages;
  if (operation->engine->ranks().size() == 1) {
    distribute_weights(operation, std::move(next));
    return;
  }
  const ipc::TimePoint prepared_by = ipc::MonotonicClock::now() + operation->weights.deadline;
  look_for_ports(operation, [this, operation, prepared_by, next = std::move(next)] {
    // What is left of the time.
    operation->weights.deadline = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(
                                               prepared_by - ipc::MonotonicClock::now()),
                                           1ms);
    if (operation->error) {
      next();
      return;
    }
    const auto& ports = operation->ports;
    // What hinders a rank from it, the rank has logged.
    const bool all =
        std::all_of(ports.begin(), ports.end(), [](const auto& port) { return port.has_value(); });
    const auto why = all ? hindrance(ports) : std::optional<std::string>("a rank takes none");
    if (why) {
      ipc::log_info("engine {}: weights go from rank 0 in messages: {}", operation->engine->name(),
                    *why);
      distribute_weights(operation, next);
      return;
    }
    operation->transport = ports[0]->transport;
    ipc::log_info("engine {}: weights go from rank 0 to {} devices by {}",
                  operation->engine->name(), ports.size() - 1, operation->transport);
    open_broadcast(operation, next);
  });
}

void GenerationOperations::look_for_ports(const OperationRef& operation,
                                          std::function<void()> next) {
  operation->ports.assign(operation->engine->ranks().size(), std::nullopt);
  ask_workers(
      operation, ipc::MessageKind::kRankBroadcast, ipc::RankBroadcast{},
      [operation = operation.get()](std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer) {
        const auto found =
            answer ? ipc::decode<ipc::RankBroadcastReply>(answer->body, "RankBroadcastReply")
                   : ipc::Result<ipc::RankBroadcastReply>(answer.error());
        if (found) {
          operation->ports[rank] = found->port;
        } else if (found.error().code == ipc::ErrorCode::kNotFound ||
                   found.error().code == ipc::ErrorCode::kVersionMismatch) {
          ipc::log_info("engine {} rank {}: no broadcast: {}", operation->engine->name(), rank,
                        found.error().message);
        } else {
          operation->updates[rank].error =
              in_rank(found.error(), operation->engine->name(), ipc::Rank{rank});
        }
      },
      std::move(next));
}

void GenerationOperations::open_broadcast(const OperationRef& operation,
                                          std::function<void()> next) {
  operation->next = std::move(next);
  operation->pending = 1;  // Held until it is sent.
  const ipc::RankBroadcast order{ipc::BroadcastPhase::kOpen, operation->weights.source.location,
                                 have_kept_one(operation->ports)};
  ask_rank(
      operation, 0, ipc::MessageKind::kRankBroadcast, order,
      [operation = operation.get()](std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer) {
        auto opened = answer
                          ? ipc::decode<ipc::RankBroadcastReply>(answer->body, "RankBroadcastReply")
                          : ipc::Result<ipc::RankBroadcastReply>(answer.error());
        if (opened && (opened->id.empty() || opened->id.size() > ipc::kMaxBroadcastId)) {
          opened = KVFERRY_ERROR(kProtocol, "it opened a broadcast with an id of {} bytes",
                                 opened->id.size());
        }
        if (opened) {
          operation->weights.broadcast = opened->id;
        } else {
          operation->updates[rank].error =
              in_rank(opened.error(), operation->engine->name(), ipc::Rank{rank});
        }
      });
  end_round(operation);
}

}  // namespace kvferry::cache_manager
