// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/trace_reader.hpp"

#include "run/child.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <vector>

namespace kvferry::soak {
namespace {

/// Twenty breaches with what came before each, and room to spare.
constexpr int kAnswerBytes = 1 << 20;

ipc::Status send_packet(int socket, const std::string& text) {
  ssize_t size = 0;
  do {
    size = ::send(socket, text.data(), text.size(), MSG_NOSIGNAL);
  } while (size < 0 && errno == EINTR);
  if (size == static_cast<ssize_t>(text.size())) return ipc::ok();
  return KVFERRY_ERRNO("packet of {} bytes to the reader of transitions", text.size());
}

/// Empty when the other end has closed.
ipc::Result<std::string> take_packet(int socket) {
  std::string text(kAnswerBytes, '\0');
  ssize_t size = 0;
  do {
    size = ::recv(socket, text.data(), text.size(), 0);
  } while (size < 0 && errno == EINTR);
  if (size < 0) return KVFERRY_ERRNO("packet from the reader of transitions");
  text.resize(static_cast<std::size_t>(size));
  return text;
}

}  // namespace

TraceReader::TraceReader(const std::filesystem::path& runtime_dir,
                         const std::string& instance,
                         const std::filesystem::path& log) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    throw ipc::Exception(KVFERRY_ERRNO("socket for the reader of transitions"));
  }
  socket_ = ipc::UniqueFd(ends[0]);
  const ipc::UniqueFd theirs(ends[1]);
  (void)::setsockopt(theirs.get(), SOL_SOCKET, SO_SNDBUF, &kAnswerBytes, sizeof(kAnswerBytes));
  cli::ChildStart start;
  start.program = "/proc/self/exe";
  start.arguments = {kServeTraceReader, runtime_dir.string(), instance};
  start.log_file = log;
  start.inherited_fd = theirs.get();
  auto process = cli::start_child(start);
  if (!process) throw ipc::Exception(std::move(process).error());
  process_ = std::move(*process);
}

TraceReader::~TraceReader() {
  if (!process_.valid()) return;
  (void)process_.signal(SIGKILL);
  (void)cli::reap_child(process_.pid());
}

ipc::Status TraceReader::check(ipc::Deadline deadline) {
  KVFERRY_TRY(send_packet(socket_.get(), "check"));
  pollfd entry{socket_.get(), POLLIN, 0};
  while (::poll(&entry, 1, deadline.poll_timeout_ms()) <= 0) {
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "the reader of transitions does not answer");
    }
  }
  KVFERRY_ASSIGN(const std::string answer, take_packet(socket_.get()));
  const auto json = nlohmann::json::parse(answer, nullptr, false);
  if (!json.is_object()) return KVFERRY_ERROR(kPeerDied, "the reader of transitions has ended");
  counts_.checks = json["checks"];
  counts_.transitions = json["transitions"];
  counts_.unseen = json["unseen"];
  counts_.breaches = json["breaches"].get<std::vector<std::string>>();
  return ipc::ok();
}

int serve_trace_reader(const std::string& runtime_dir, const std::string& instance) {
  auto dir = ipc::RuntimeDir::find(runtime_dir, instance);
  if (!dir) {
    fmt::print(stderr, "soak: {}\n", dir.error().to_string());
    return EXIT_FAILURE;
  }
  TraceWatch watch(*std::move(dir));
  for (;;) {
    const auto asked = take_packet(cli::kInheritedFd);
    if (!asked || asked->empty()) return EXIT_SUCCESS;
    watch.check();
    const TraceCounts& counts = watch.counts();
    const nlohmann::json answer = {{"checks", counts.checks},
                                   {"transitions", counts.transitions},
                                   {"unseen", counts.unseen},
                                   {"breaches", counts.breaches}};
    const std::string text = answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (const ipc::Status sent = send_packet(cli::kInheritedFd, text); !sent) {
      fmt::print(stderr, "soak: {}\n", sent.error().to_string());
      return EXIT_FAILURE;
    }
  }
}

}  // namespace kvferry::soak
