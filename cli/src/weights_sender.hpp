// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "operator_calls.hpp"

#include <filesystem>
#include <functional>
#include <string>

namespace kvferry::cli {

/// Sends a safetensors file to an engine's workers in messages, over the connection that the update
/// is asked for with. @threading the loop's thread of the calls.
class WeightsSender {
 public:
  /// What an update names as its source.
  using Done = std::function<void(ipc::Result<ipc::WeightsSource>)>;

  explicit WeightsSender(OperatorCalls& calls) : calls_(calls) {}
  WeightsSender(const WeightsSender&) = delete;
  WeightsSender& operator=(const WeightsSender&) = delete;

  /// done is called once, from the loop or at once. @pre no other is under way, nor another command
  void send(const std::filesystem::path& file, const std::string& engine, Done done);

 private:
  void send_next();
  [[nodiscard]] ipc::Status read_next();
  void finish(ipc::Result<ipc::WeightsSource> result);

  OperatorCalls& calls_;
  ipc::UniqueFd file_;
  std::string name_;
  ipc::WeightsPart part_;
  Done done_;
};

}  // namespace kvferry::cli
