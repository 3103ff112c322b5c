// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "operator_link.hpp"

#include "kvferry/ipc/os/runtime_dir.hpp"

#include <unistd.h>

namespace kvferry::cli {

ipc::Result<std::unique_ptr<ipc::ControlLink>> connect_operator(const std::string& runtime_dir,
                                                                const std::string& instance,
                                                                ipc::Deadline deadline) {
  KVFERRY_ASSIGN(const ipc::RuntimeDir dir, ipc::RuntimeDir::open(runtime_dir, instance));
  ipc::ControlLink::Options options;
  options.registry_path = dir.registry_socket();
  options.control_path = dir.control_socket();
  options.kind = ipc::ProcessKind::kOperator;
  options.incarnation = ipc::IncarnationId::random();
  options.name = fmt::format("kvferry (pid {})", getpid());
  auto link = ipc::ControlLink::connect(std::move(options), deadline);
  if (!link && link.error().code == ipc::ErrorCode::kNotFound) {
    return KVFERRY_ERROR(kNoManager, "no manager answers on instance '{}' ({})", instance,
                         dir.path().string());
  }
  return link;
}

}  // namespace kvferry::cli
