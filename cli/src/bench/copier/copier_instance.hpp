// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_target.hpp"
#include "bench/copier/messages.hpp"
#include "bench/copier/pool_places.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/worker/client.hpp"
#include "run/children.hpp"
#include "run/leak_check.hpp"
#include "run/run_dir.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <unordered_map>
#include <vector>

namespace kvferry::cli {

/// A worker that copies by itself, for one measurement, with this process as its engine: the pool
/// is this process's, and nothing of the device's memory is shared.
/// @threading the loop's thread.
class CopierInstance final : public BenchTarget {
 public:
  /// Throws Exception, as RunProcesses. All outlive this. options: of the plan are taken from it.
  CopierInstance(ipc::EventLoop& loop,
                 const RunDir& dir,
                 InstancePlan plan,
                 OwnStrategy strategy,
                 const ipc::ArenaLayout& layout,
                 Options options);
  CopierInstance(const CopierInstance&) = delete;
  CopierInstance& operator=(const CopierInstance&) = delete;
  ~CopierInstance() override;

  /// Returns when jobs are accepted.
  [[nodiscard]] ipc::Status start();

  [[nodiscard]] ipc::Result<std::uint64_t> submit(std::uint64_t handle,
                                                  const std::vector<worker::SequenceItem>& blocks,
                                                  bool to_host) override;
  void take(const std::function<void(const Ended&)>& each) override;
  [[nodiscard]] ipc::Status drop(std::uint64_t handle) override;
  [[nodiscard]] bool accepts() override { return ready_; }
  [[nodiscard]] ipc::Status kill_copier() override { return kill(kName); }

  /// Writes a pattern into a device block, through the pool. No job of others may be under way.
  [[nodiscard]] ipc::Status write_mark(const worker::SequenceItem& block);
  /// Whether the block still holds it.
  [[nodiscard]] ipc::Result<bool> has_mark(const worker::SequenceItem& block);

  /// Ends all.
  [[nodiscard]] Leavings end(const DeviceProbe& devices, bool failed);

 private:
  static constexpr const char* kName = "copier";
  struct Job {
    std::size_t requests = 0;  ///< Without a reply.
    std::uint64_t bytes = 0;
    std::optional<ipc::Error> error;
  };

  void on_connection();
  [[nodiscard]] ipc::Status greet();
  void on_readable();
  [[nodiscard]] ipc::Status on_packet(const ipc::Packet& packet);
  void on_lost(const ipc::Error& why);
  void send_waiting();
  void end_request(std::uint64_t id, const std::optional<ipc::Error>& error);
  [[nodiscard]] ipc::Status run_alone(const worker::SequenceItem& block, bool to_host);
  void let_go();

  const InstancePlan plan_;
  const OwnStrategy strategy_;
  const ipc::Digest fingerprint_;
  const std::uint64_t arena_bytes_;
  PoolPlaces places_;
  std::optional<ipc::RuntimeDir> runtime_dir_;  ///< Longer than the name in it.
  std::optional<ipc::PacketListener> listener_;
  ipc::UniqueFd pool_fd_;
  ipc::SharedMapping pool_;
  ipc::PacketSocket socket_;
  bool ready_ = false;
  std::uint64_t last_job_ = 0;
  std::uint64_t last_request_ = 0;
  std::unordered_map<std::uint64_t, Job> jobs_;
  std::unordered_map<std::uint64_t, std::uint64_t> requests_;  ///< That are out: of which job.
  std::deque<CopyRequest> waiting_;                            ///< Not sent yet.
  std::vector<Ended> ended_;
};

}  // namespace kvferry::cli
