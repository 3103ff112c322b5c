// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::test {

/// Records the events of a server as text, and answers requests: kStatus with its count, kPin
/// never, kClear after a kUnpin event. Waits for events with a deadline.
class RecordingHandler : public ipc::ControlHandler {
 public:
  void attach(ipc::ControlServer& server) { server_ = &server; }

  void on_peer(const ipc::Peer& peer) override { record("peer " + peer.name); }
  void on_peer_silent(const ipc::Peer& peer) override { record("silent " + peer.name); }
  void on_peer_died(const ipc::Peer& peer) override { record("died " + peer.name); }
  void on_peer_left(const ipc::Peer& peer) override { record("left " + peer.name); }
  void on_peer_writable(const ipc::Peer& peer) override { record("writable " + peer.name); }
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override {
    record(std::string(to_string(envelope.kind)) + " " + peer.name);
    if (hook) hook(peer, envelope);
    if (envelope.kind == ipc::MessageKind::kBye) server_->forget_when_closed(peer.id);
    if (envelope.kind == ipc::MessageKind::kStatus) {
      ipc::StatusReply reply;
      reply.json = std::to_string(++answered_);
      (void)server_->reply(peer.id, envelope, reply);
    }
  }

  /// True once the text was recorded so many times.
  bool wait_for(const std::string& text, int times = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20),
                             [&] { return count_locked(text) >= times; });
  }
  int count(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return count_locked(text);
  }

  /// How much was recorded before the text was first, or in all.
  std::size_t recorded_before(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return static_cast<std::size_t>(std::find(events_.begin(), events_.end(), text) -
                                    events_.begin());
  }

  /// Called on the loop's thread.
  std::function<void(const ipc::Peer&, const ipc::Envelope&)> hook;

 private:
  void record(std::string text) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(text));
    changed_.notify_all();
  }
  int count_locked(const std::string& text) const {
    int found = 0;
    for (const std::string& event : events_) found += event == text ? 1 : 0;
    return found;
  }

  ipc::ControlServer* server_ = nullptr;
  int answered_ = 0;
  std::mutex mutex_;  // guards events_
  std::condition_variable changed_;
  std::vector<std::string> events_;
};

/// A ControlServer on a loop of its own thread.
class ServerThread {
 public:
  explicit ServerThread(ipc::ControlServer::Options options,
                        std::function<void(const ipc::Peer&, const ipc::Envelope&)> hook = {}) {
    handler.hook = std::move(hook);
    server = std::make_unique<ipc::ControlServer>(loop, std::move(options), handler);
    handler.attach(*server);
    thread_ = std::thread([this] {
      loop.run();
      server.reset();
    });
  }
  ServerThread(const ServerThread&) = delete;
  ServerThread& operator=(const ServerThread&) = delete;
  ~ServerThread() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    loop.stop();
    thread_.join();
  }
  /// Runs a call on the loop's thread and waits for it.
  void call(std::function<void()> function) {
    std::mutex mutex;
    std::condition_variable done_changed;
    bool done = false;
    loop.post([&] {
      function();
      const std::lock_guard lock(mutex);
      done = true;
      done_changed.notify_all();
    });
    std::unique_lock lock(mutex);
    done_changed.wait(lock, [&] { return done; });
  }

  ipc::EventLoop loop;
  RecordingHandler handler;
  std::unique_ptr<ipc::ControlServer> server;

 private:
  std::thread thread_;
};

inline ipc::ControlServer::Options server_options(const std::filesystem::path& dir) {
  ipc::ControlServer::Options options;
  options.registry_path = dir / "registry";
  options.control_path = dir / "control";
  options.session = ipc::Digest::from_words(1, 2);
  return options;
}

inline ipc::ControlLink::Options link_options(const std::filesystem::path& dir,
                                              const std::string& name) {
  ipc::ControlLink::Options options;
  options.registry_path = dir / "registry";
  options.control_path = dir / "control";
  options.incarnation = ipc::Digest::random();
  options.name = name;
  return options;
}

}  // namespace kvferry::test
