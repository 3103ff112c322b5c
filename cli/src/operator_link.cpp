// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "operator_link.hpp"

#include "kvferry/ipc/os/runtime_dir.hpp"

namespace kvferry::cli {
namespace {

ipc::Error no_manager(const std::string& instance, const std::string& why) {
  return KVFERRY_ERROR(kNoManager,
                       "no manager on instance '{}': {}; start one with 'kvferry manager "
                       "--instance {}', or name another --instance or --runtime-dir",
                       instance, why, instance);
}

}  // namespace

ipc::Result<std::unique_ptr<ipc::ControlLink>> connect_operator(const std::string& runtime_dir,
                                                                const std::string& instance,
                                                                ipc::Deadline deadline) {
  // Looking at an instance leaves no trace of it.
  const auto found = ipc::RuntimeDir::find(runtime_dir, instance);
  if (!found) {
    if (found.error().code != ipc::ErrorCode::kNotFound) return found.error();
    return no_manager(instance, found.error().message);
  }
  const ipc::RuntimeDir& dir = *found;
  ipc::ControlLink::Options options;
  options.registry_path = dir.registry_socket();
  options.control_path = dir.control_socket();
  options.kind = ipc::ProcessKind::kOperator;
  options.incarnation = ipc::IncarnationId::random();
  options.name = "operator";
  auto link = ipc::ControlLink::connect(std::move(options), deadline);
  if (!link && link.error().code == ipc::ErrorCode::kNoManager) {
    return no_manager(instance, link.error().message);
  }
  return link;
}

}  // namespace kvferry::cli
