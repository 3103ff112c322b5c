// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/component_commands.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "rank/reply_to.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

/// It is an engine's code.
template <typename T, typename Call> Result<T> guarded(Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return KVFERRY_ERROR(kSystem, "it threw: {}", error.what());
  }
}

bool is_asked_for(const ComponentNames& asked, const std::string& name) {
  return asked.all || std::find(asked.names.begin(), asked.names.end(), name) != asked.names.end();
}

ComponentOutcome kept(ComponentState component) {
  ComponentOutcome one;
  one.outcome.device_bytes_before = component.device_bytes;
  one.outcome.component = std::move(component);
  return one;
}

}  // namespace

bool ComponentCommands::only_looks(const Envelope& request) {
  const auto order = decode<RankComponents>(request.body, "RankComponents");
  return order && order->release.only_looks();
}

Envelope ComponentCommands::run(const Envelope& request, TimePoint received) {
  Envelope reply = reply_to(request);
  auto outcome = answer(request, received);
  if (outcome) {
    reply.body = encode(*outcome);
  } else {
    log_warn("{}", outcome.error().to_string());
    reply.error = std::move(outcome).error();
  }
  return reply;
}

// Before anything is released.
Status ComponentCommands::check_known(const std::vector<ComponentState>& known,
                                      const ComponentNames& asked) const {
  for (const std::string& name : asked.names) {
    if (std::any_of(known.begin(), known.end(),
                    [&](const ComponentState& one) { return one.name == name; })) {
      continue;
    }
    std::string names;
    for (const ComponentState& one : known) {
      names += (names.empty() ? "" : ", ") + one.name;
    }
    return KVFERRY_ERROR(kNotFound, "this worker has no component '{}': it has {}", name,
                         user_ == nullptr ? "none (WorkerHooks::components)"
                         : names.empty()  ? "none"
                                          : names);
  }
  return ok();
}

Result<RankComponentsReply> ComponentCommands::answer(const Envelope& request, TimePoint received) {
  KVFERRY_ASSIGN(const auto order, decode<RankComponents>(request.body, "RankComponents"));
  KVFERRY_TRY(order.release.check());
  std::vector<ComponentState> known;
  if (user_ != nullptr) {
    KVFERRY_ASSIGN(known,
                   guarded<std::vector<ComponentState>>([this] { return user_->components(); }));
  }
  KVFERRY_TRY(check_known(known, order.release));
  const Deadline deadline = Deadline::at(received + order.deadline);
  if (!order.release.only_looks() && deadline.expired()) {
    return KVFERRY_ERROR(kTimeout,
                         "its turn came after {} ms, behind what else this worker was "
                         "told; nothing was released: retry",
                         order.deadline.count());
  }
  RankComponentsReply reply;
  for (ComponentState& one : known) {
    reply.components.push_back(is_asked_for(order.release, one.name)
                                   ? release(std::move(one), deadline)
                                   : kept(std::move(one)));
  }
  return reply;
}

ComponentOutcome ComponentCommands::release(ComponentState before, Deadline deadline) {
  auto released = guarded<ComponentRelease>([&] { return user_->release(before.name, deadline); });
  if (released) return {.outcome = *std::move(released), .released = true, .error = {}};
  log_warn("component {}: {}", before.name, released.error().to_string());
  const std::uint64_t bytes_before = before.device_bytes;
  ComponentOutcome failed = kept(look_again(std::move(before)));
  failed.outcome.device_bytes_before = bytes_before;
  failed.error = std::move(released).error();
  return failed;
}

// What failed may have given up its memory all the same, when it was only the allocator that could
// not be emptied.
ComponentState ComponentCommands::look_again(ComponentState before) const {
  auto now = guarded<std::vector<ComponentState>>([this] { return user_->components(); });
  if (!now) return before;
  const auto found = std::find_if(
      now->begin(), now->end(), [&](const ComponentState& one) { return one.name == before.name; });
  return found == now->end() ? before : std::move(*found);
}

}  // namespace kvferry::ipc
