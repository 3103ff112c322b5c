// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "manager/context.hpp"

#include <map>
#include <string>

namespace kvferry::cache_manager {

/// New weights that come in messages: each part goes to the workers of all ranks, which keep it
/// until an update is prepared from it. Nothing is kept here. @threading the loop's thread.
class WeightsUploads {
 public:
  explicit WeightsUploads(ManagerContext& context) : context_(context) {}
  WeightsUploads(const WeightsUploads&) = delete;
  WeightsUploads& operator=(const WeightsUploads&) = delete;
  ~WeightsUploads() = default;

  /// kInvalidArgument for a part that no image has.
  [[nodiscard]] static ipc::Status check(const ipc::WeightsPart& part);
  /// Answers the request when every rank has it, or with the first rank's error.
  void pass_on(const ipc::Peer& peer,
               const ipc::Envelope& request,
               ipc::WeightsPart part,
               const EngineRecord& engine);
  /// It has died, or closed its connection: nobody updates to what it had begun to send.
  void on_peer_gone(const ipc::IncarnationId& peer);

 private:
  struct Upload {
    std::string engine;
    ipc::Digest upload;
  };
  void forget(const Upload& upload);

  ManagerContext& context_;
  std::map<ipc::IncarnationId, Upload> senders_;
};

}  // namespace kvferry::cache_manager
