// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "service_thread.hpp"

#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::test {

/// The manager's half of the protocol, answered by a script: a real ControlServer on a thread of
/// its own. Destroying it is the manager's end. Scripts and state live on its thread; run() gets
/// there.
class ScriptedManager final : public ipc::ControlHandler {
 public:
  using Script =
      std::function<void(ScriptedManager&, const ipc::IncarnationId& from, const ipc::Envelope&)>;

  ScriptedManager(ipc::EventLoop& loop, const ipc::RuntimeDir& dir)
      : server_(loop, options(dir), *this) {}

  void on_peer(const ipc::Peer& peer) override { engine = peer.id; }
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override {
    seen.push_back(envelope);
    if (const auto script = scripts.find(envelope.kind); script != scripts.end()) {
      script->second(*this, peer.id, envelope);
      return;
    }
    if (envelope.kind == ipc::MessageKind::kEngineHello) {
      if (refuse_hello) {
        (void)server_.reply_error(peer.id, envelope, *refuse_hello);
        return;
      }
      (void)server_.reply(peer.id, envelope, state);
    } else if (envelope.request.value != 0) {
      (void)server_.reply(peer.id, envelope, ipc::Empty{});
    }
  }
  void on_peer_silent(const ipc::Peer&) override { ++silent; }
  void on_peer_died(const ipc::Peer&) override {}

  void send_state() { (void)server_.notify(engine, ipc::MessageKind::kEngineState, state); }
  void send_done(ipc::JobId job, std::vector<std::uint8_t> results, std::uint64_t bytes = 0) {
    ipc::JobDone done;
    done.job = job;
    done.results = std::move(results);
    done.bytes = bytes;
    (void)server_.notify(engine, ipc::MessageKind::kJobDone, done);
  }
  [[nodiscard]] std::size_t count(ipc::MessageKind kind) const {
    std::size_t found = 0;
    for (const auto& envelope : seen) found += envelope.kind == kind ? 1U : 0U;
    return found;
  }
  [[nodiscard]] ipc::ControlServer& server() { return server_; }

  ipc::IncarnationId engine;  ///< The peer that came last.
  ipc::EngineState state;
  std::optional<ipc::Error> refuse_hello;
  std::map<ipc::MessageKind, Script> scripts;
  std::vector<ipc::Envelope> seen;
  int silent = 0;

 private:
  static ipc::ControlServer::Options options(const ipc::RuntimeDir& dir) {
    ipc::ControlServer::Options options;
    options.registry_path = dir.registry_socket();
    options.control_path = dir.control_socket();
    options.session = ipc::SessionId::random();
    return options;
  }

  ipc::ControlServer server_;
};

/// Its thread.
class ManagerThread {
 public:
  ManagerThread(const ipc::RuntimeDir& dir, std::function<void(ScriptedManager&)> prepare)
      : thread_(
            "manager",
            [&dir, prepare = std::move(prepare)](ipc::EventLoop& loop) {
              auto manager = std::make_unique<ScriptedManager>(loop, dir);
              prepare(*manager);
              return manager;
            },
            [] {}) {}

  /// Runs the call on the manager's thread and waits for it.
  void run(std::function<void(ScriptedManager&)> call) {
    std::promise<void> done;
    thread_.post([&done, &call](ScriptedManager& manager) {
      call(manager);
      done.set_value();
    });
    done.get_future().get();
  }

 private:
  worker::ServiceThread<ScriptedManager> thread_;
};

}  // namespace kvferry::test
