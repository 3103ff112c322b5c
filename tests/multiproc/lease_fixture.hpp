// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::test {

/// The last line that a peer said about its LeaseView.
struct SeenView {
  std::string phase = "vacant";
  std::uint64_t epoch = 0;
  bool connected = false;
  bool mapped = false;
  std::uint64_t prepared_by = 0;
  std::uint32_t leases = 0;
  std::uint64_t quarantined = 0;
  std::string refused = "-";
  std::string peer_refused = "-";
  std::string note = "-";
};

/// A kvferry_lease_peer process. Commands: init MS, clear EPOCH MS, detach EPOCH MS, wait EPOCH MS
/// (answered when done, others may follow meanwhile); close|open GATE and fail GATE N with the
/// gates mapped, zeroing (half-way), quiesce, unmapped and freed ("at GATE EPOCH" when held there);
/// leave (ends owner or attacher, not the process), cut (its connections), poke N and peek (the
/// first byte), fill N and others N (all bytes), address, resources, fork, quit. A worker zeroes
/// undefined contents; zeroings tells how often it did. With source=yes, an engine's memory: source
/// count EPOCH|fail|throw|keep|free|again.
class LeasePeer {
 public:
  /// program: beside the test's; environment: NAME=VALUE.
  explicit LeasePeer(const std::vector<std::string>& arguments,
                     const std::string& program = "kvferry_lease_peer",
                     const std::vector<std::string>& environment = {});

  void tell(const std::string& command);
  /// The next line that begins with the prefix; views on the way are remembered, other lines
  /// dropped. Fails the test and returns nothing when none comes.
  std::string expect(const std::string& prefix);
  std::string ask(const std::string& command, const std::string& prefix);
  /// Reads on until the view is as wanted.
  SeenView expect_view(const char* what, const std::function<bool(const SeenView&)>& wanted);
  void expect_mapped(std::uint64_t epoch);
  void kill_and_reap();
  /// SIGSTOP, and waits until every thread has stopped: the signal alone is no such promise.
  void stop();
  void resume() { process_.signal(SIGCONT); }
  /// Ends it in order.
  void quit();

  /// Takes a line that begins with "view".
  void remember(const std::string& line);

  ChildProcess& process() { return process_; }
  [[nodiscard]] const SeenView& view() const { return view_; }

 private:
  ChildProcess process_;
  SeenView view_;
};

/// Owner and attachers of one rank in processes of their own, on a host device. At the end of each
/// test no name is left, the device's memory is free again, counted from outside, and no process
/// took a transition that the handshake does not allow.
class LeaseFixture : public ::testing::Test {
 protected:
  using Arguments = std::map<std::string, std::string>;

  LeaseFixture();
  void TearDown() override;
  void expect_allowed_transitions();

  [[nodiscard]] std::unique_ptr<LeasePeer> start(const std::string& self, Arguments extra = {});
  /// What start() gives a peer.
  [[nodiscard]] std::vector<std::string> peer_arguments(const std::string& self, Arguments extra);
  /// A peer of the owning, or of the attaching kind; "up" is awaited.
  [[nodiscard]] std::unique_ptr<LeasePeer> start_owner(Arguments extra = {});
  [[nodiscard]] std::unique_ptr<LeasePeer> start_attacher(Arguments extra = {});
  [[nodiscard]] std::uint64_t used_bytes() const;
  /// Zero as soon as the kernel has let go of what dead processes had; see host_memory.hpp.
  [[nodiscard]] std::uint64_t used_bytes_after_death() const;
  [[nodiscard]] std::string other_kind() const { return owner_ == "worker" ? "mover" : "worker"; }
  /// Of all files but recorded transitions.
  [[nodiscard]] std::vector<std::string> names() const;

  std::string owner_ = "worker";  ///< Which kind owns.
  std::string handles_ = "vmm";
  Arguments common_;  ///< For every peer.
  std::string device_name_;
  std::uint64_t capacity_mib_ = 64;
  ShortTempDir dir_;
  /// Keeps the transitions of processes that have ended.
  std::optional<ipc::RuntimeDir> instance_;
};

/// Both ownership roles times both kinds of handles.
class LeaseEveryWay : public LeaseFixture,
                      public ::testing::WithParamInterface<std::pair<const char*, const char*>> {
 protected:
  LeaseEveryWay() {
    owner_ = GetParam().first;
    handles_ = GetParam().second;
  }
};

inline const auto kEveryWay = ::testing::Values(std::pair{"worker", "vmm"},
                                                std::pair{"worker", "legacy"},
                                                std::pair{"mover", "vmm"},
                                                std::pair{"mover", "legacy"});

inline std::string way_name(
    const ::testing::TestParamInfo<std::pair<const char*, const char*>>& info) {
  return std::string(info.param.first) + "_owns_" + info.param.second;
}

}  // namespace kvferry::test
