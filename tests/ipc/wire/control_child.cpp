// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Helper of the control plane's multi-process tests.
//   server DIR       answers kStatus; dies by SIGKILL on kClear; says what its handler is told
//   peer DIR NAME    connects; commands: call, pin, close
#include "kvferry/ipc/wire/control.hpp"
#include "support/child_side.hpp"

#include <unistd.h>

#include <csignal>
#include <string>

namespace {

using kvferry::test::hear;
using kvferry::test::say;
namespace ipc = kvferry::ipc;

class Handler : public ipc::ControlHandler {
 public:
  ipc::ControlServer* server = nullptr;

  void on_peer(const ipc::Peer& peer) override { say("peer " + peer.name); }
  void on_peer_silent(const ipc::Peer& peer) override { say("silent " + peer.name); }
  void on_peer_died(const ipc::Peer& peer) override { say("died " + peer.name); }
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override {
    if (envelope.kind == ipc::MessageKind::kClear) ::kill(::getpid(), SIGKILL);
    if (envelope.kind != ipc::MessageKind::kStatus) return;
    ipc::StatusReply reply;
    reply.json = std::to_string(::getpid());
    if (const ipc::Status sent = server->reply(peer.id, envelope, reply); !sent) {
      say(sent.error().to_string());
    }
  }
};

int serve(const std::filesystem::path& dir) {
  ipc::EventLoop loop;
  Handler handler;
  ipc::ControlServer::Options options;
  options.registry_path = dir / "registry";
  options.control_path = dir / "control";
  options.session = ipc::Digest::random();
  try {
    ipc::ControlServer server(loop, options, handler);
    handler.server = &server;
    say("ready");
    loop.watch(STDIN_FILENO, [&] {
      if (!hear()) loop.stop();
    });
    return loop.run() ? 0 : 1;
  } catch (const ipc::Exception& exception) {
    say(exception.what());
    return 1;
  }
}

int be_peer(const std::filesystem::path& dir, const std::string& name) {
  ipc::ControlLink::Options options;
  options.registry_path = dir / "registry";
  options.control_path = dir / "control";
  options.incarnation = ipc::Digest::random();
  options.name = name;
  const auto deadline = ipc::Deadline::after(std::chrono::seconds(20));
  auto connected = ipc::ControlLink::connect(options, deadline);
  say(connected ? "connected" : connected.error().to_string());
  if (!connected) return 1;
  std::unique_ptr<ipc::ControlLink> link = std::move(*connected);
  while (const auto line = hear()) {
    if (*line == "close") {
      link.reset();
      say("closed");
    } else if (*line == "pin") {
      const auto reply =
          link->call<ipc::PinReply>(ipc::MessageKind::kPin, ipc::PinRequest{}, deadline);
      say(reply ? "pinned " + std::to_string(reply->pinned) : reply.error().to_string());
    } else {
      const auto reply =
          link->call<ipc::StatusReply>(ipc::MessageKind::kStatus, ipc::Empty{}, deadline);
      say(reply ? reply->json : reply.error().to_string());
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  kvferry::test::disable_core_dumps();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "server" && argc == 3) return serve(argv[2]);
  if (mode == "peer" && argc == 4) return be_peer(argv[2], argv[3]);
  return 2;
}
