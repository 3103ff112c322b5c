// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "multiproc/lease_fixture.hpp"

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace kvferry::test {

/// One peer whose lines are taken as they come, whatever becomes of it.
class Actor {
 public:
  explicit Actor(std::unique_ptr<LeasePeer> peer) : peer_(std::move(peer)) {}

  void tell(const std::string& command) { (void)peer_->process().write_line(command); }
  /// Takes what it says within a moment.
  void hear(std::chrono::milliseconds time) {
    const ipc::Deadline deadline = ipc::Deadline::after(time);
    while (auto line = peer_->process().read_line(deadline)) {
      if (line->starts_with("view ")) peer_->remember(*line);
      lines_.push_back(std::move(*line));
    }
  }
  /// The first line with this beginning since the last forget().
  [[nodiscard]] std::optional<std::string> said(const std::string& beginning) const {
    for (const std::string& line : lines_) {
      if (line.starts_with(beginning)) return line;
    }
    return std::nullopt;
  }
  void forget() { lines_.clear(); }
  [[nodiscard]] const SeenView& view() const { return peer_->view(); }
  [[nodiscard]] bool maps(std::uint64_t epoch) const {
    return view().mapped && view().epoch == epoch && view().phase == "ready";
  }
  [[nodiscard]] bool has_ended() const {
    return peer_->process().wait_zombie(ipc::Deadline::after({}));
  }
  [[nodiscard]] pid_t pid() const { return peer_->process().pid(); }
  void signal(int number) { peer_->process().signal(number); }
  LeasePeer& peer() { return *peer_; }

 private:
  std::unique_ptr<LeasePeer> peer_;
  std::deque<std::string> lines_;
};

}  // namespace kvferry::test
