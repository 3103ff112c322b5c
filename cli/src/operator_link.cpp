// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "operator_link.hpp"

#include "kvferry/ipc/os/runtime_dir.hpp"

#include <poll.h>

namespace kvferry::cli {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectTime{3'000};
/// The manager gives ranks some time beyond the deadline (ending a mover, proving that its memory
/// is back) and answers then at the latest.
constexpr milliseconds kReplyMargin{15'000};

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
  options.rings = false;  // a call or two
  auto link = ipc::ControlLink::connect(std::move(options), deadline);
  if (!link && link.error().code == ipc::ErrorCode::kNoManager) {
    return no_manager(instance, link.error().message);
  }
  return link;
}

ipc::Result<ipc::Envelope> ask_operator(const CommonOptions& common,
                                        ipc::MessageKind kind,
                                        ipc::Bytes body,
                                        milliseconds time) {
  KVFERRY_ASSIGN(const auto link, connect_operator(common.runtime_dir, common.instance,
                                                   ipc::Deadline::after(kConnectTime)));
  ipc::Envelope question;
  question.kind = kind;
  question.request = link->next_request();
  question.body = std::move(body);
  KVFERRY_TRY(link->send(question));
  const auto deadline = ipc::Deadline::after(time + kReplyMargin);
  while (true) {
    KVFERRY_ASSIGN(auto received, link->try_receive());
    if (received && received->is_reply && received->request == question.request) {
      if (received->body.empty() && received->error) return std::move(*received->error);
      return std::move(*received);
    }
    if (received) continue;
    if (link->server_lost()) return KVFERRY_ERROR(kPeerDied, "the manager died meanwhile");
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "the manager (pid {}) did not answer; the {} may still run",
                           link->server().pid(), to_string(kind));
    }
    pollfd entry{link->fd(), POLLIN, 0};
    // wait: the manager's reply; deadline, the command's own and kReplyMargin; the manager's pidfd
    // and connection
    ::poll(&entry, 1, deadline.poll_timeout_ms());
  }
}

}  // namespace kvferry::cli
