// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "support/child_process.hpp"

#include <nlohmann/json.hpp>
#include <poll.h>

#include <functional>
#include <string>

namespace kvferry::test {

/// Waits until the status of the manager, on the default instance, satisfies the condition; false
/// when it does not in time, or ends.
inline bool wait_status(const std::string& runtime_dir,
                        const ChildProcess& manager,
                        const std::function<bool(const nlohmann::json&)>& condition) {
  const auto dir = ipc::RuntimeDir::open(runtime_dir, "default").value();
  const ipc::Deadline deadline = soon();
  while (!deadline.expired()) {
    ipc::ControlLink::Options options;
    options.registry_path = dir.registry_socket();
    options.control_path = dir.control_socket();
    options.incarnation = ipc::IncarnationId::random();
    options.name = "test";
    const auto link = ipc::ControlLink::connect(options, deadline);
    const auto reply =
        link ? (*link)->call<ipc::StatusReply>(ipc::MessageKind::kStatus, ipc::Empty{}, deadline)
             : ipc::Result<ipc::StatusReply>(link.error());
    if (reply && condition(nlohmann::json::parse(reply->json))) return true;
    constexpr int kLookAgainMs = 10;
    pollfd end{manager.pidfd(), POLLIN, 0};
    if (::poll(&end, 1, kLookAgainMs) > 0) return false;
  }
  return false;
}

}  // namespace kvferry::test
