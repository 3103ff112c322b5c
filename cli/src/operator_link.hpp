// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "options.hpp"

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::cli {

/// A link to the running manager of an instance, as its operator. kNoManager when there is none.
[[nodiscard]] ipc::Result<std::unique_ptr<ipc::ControlLink>> connect_operator(
    const std::string& runtime_dir, const std::string& instance, ipc::Deadline deadline);

/// What a command came to: also when it failed on some ranks, all of them are told.
template <typename Reply> struct Outcome {
  Reply reply;
  std::optional<ipc::Error> error;
};

/// Connects, asks once and hands back the answer. An error that comes without anything else is
/// returned as one. time: the command's own deadline; the manager gives ranks some time beyond it.
[[nodiscard]] ipc::Result<ipc::Envelope> ask_operator(const CommonOptions& common,
                                                      ipc::MessageKind kind,
                                                      ipc::Bytes body,
                                                      std::chrono::milliseconds time);
template <typename Reply, typename Request>
[[nodiscard]] ipc::Result<Outcome<Reply>> ask_outcome(const CommonOptions& common,
                                                      ipc::MessageKind kind,
                                                      const Request& request,
                                                      std::chrono::milliseconds time) {
  KVFERRY_ASSIGN(ipc::Envelope answer, ask_operator(common, kind, ipc::encode(request), time));
  Outcome<Reply> outcome;
  outcome.error = std::move(answer.error);
  KVFERRY_ASSIGN(outcome.reply, ipc::decode<Reply>(answer.body, "reply"));
  return outcome;
}
template <typename Reply, typename Request>
[[nodiscard]] ipc::Result<Reply> ask(const CommonOptions& common,
                                     ipc::MessageKind kind,
                                     const Request& request,
                                     std::chrono::milliseconds time) {
  KVFERRY_ASSIGN(auto outcome, ask_outcome<Reply>(common, kind, request, time));
  if (outcome.error) return std::move(*outcome.error);
  return std::move(outcome.reply);
}

/// The end of a command that all ranks were asked for: shows what they came to, also when it failed
/// on some, then what failed and why. Returns the exit code: done's, when nothing failed.
template <typename Reply, typename Show, typename ReportFailures, typename Done>
[[nodiscard]] int end_command(std::string_view command,
                              const ipc::Result<Outcome<Reply>>& outcome,
                              const Show& show,
                              const ReportFailures& report_failures,
                              const Done& done) {
  if (!outcome) return failure(command, outcome.error());
  show(outcome->reply);
  if (!outcome->error) return done(outcome->reply);
  report_failures(outcome->reply);
  return failure(command, *outcome->error);
}

}  // namespace kvferry::cli
