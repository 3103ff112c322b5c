// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "kvferry/worker/components.hpp"
#include "runner_calls.hpp"
#include "weights_store.hpp"

#include <atomic>
#include <cstdint>
#include <optional>

namespace kvferry::worker {

/// The components of the reference worker: the weights' tensors, and the decode graph.
/// @threading as its parts. @lifetime allocator, weights and runner outlive it.
class WorkerComponents {
 public:
  static constexpr const char* kWeights = "weights";
  static constexpr const char* kDecodeGraph = "decode_graph";

  /// weights: null for none. graph_bytes: what the decode graph has.
  WorkerComponents(CachingAllocator& allocator,
                   WeightsStore* weights,
                   const std::atomic<std::uint64_t>& graph_bytes,
                   const RunnerCalls& runner);

  [[nodiscard]] ComponentRegistry& registry() noexcept { return registry_; }
  /// The weights, whose use ends with each commit: what their strategy does not keep is given up
  /// then. @pre there are weights
  [[nodiscard]] ipc::WeightsUser& weights() noexcept { return *user_; }

 private:
  class Weights final : public Component {
   public:
    explicit Weights(WeightsStore& store) : store_(store) {}
    [[nodiscard]] std::uint64_t device_bytes() const override { return store_.device_bytes(); }
    [[nodiscard]] ipc::Result<std::uint64_t> give_up(ipc::Deadline deadline) override {
      KVFERRY_TRY(store_.give_up(deadline));
      return store_.device_bytes();
    }

   private:
    WeightsStore& store_;
  };
  class Graph final : public Component {
   public:
    Graph(const std::atomic<std::uint64_t>& bytes, const RunnerCalls& runner)
        : bytes_(bytes), runner_(runner) {}
    [[nodiscard]] std::uint64_t device_bytes() const override { return bytes_.load(); }
    [[nodiscard]] ipc::Result<std::uint64_t> give_up(ipc::Deadline deadline) override;

   private:
    const std::atomic<std::uint64_t>& bytes_;
    const RunnerCalls& runner_;
  };
  class UsedWeights final : public ipc::WeightsUser {
   public:
    UsedWeights(WeightsStore& store, ComponentRegistry& registry)
        : store_(store), registry_(registry) {}
    [[nodiscard]] ipc::Result<std::uint64_t> prepare(const ipc::WeightsSource& source,
                                                     ipc::Deadline deadline) override {
      return store_.prepare(source, deadline);
    }
    [[nodiscard]] ipc::Result<ipc::BroadcastPort> broadcast_port() override {
      return store_.broadcast_port();
    }
    [[nodiscard]] ipc::Result<ipc::BroadcastId> open_broadcast(const std::string& file,
                                                               bool again) override {
      return store_.open_broadcast(file, again);
    }
    [[nodiscard]] ipc::Result<std::uint64_t> prepare_broadcast(const ipc::BroadcastId& id,
                                                               ipc::Deadline deadline) override {
      return store_.prepare_broadcast(id, deadline);
    }
    [[nodiscard]] ipc::Status commit(ipc::Deadline deadline) override;
    void abandon() override { store_.abandon(); }
    void cancel() noexcept override { store_.cancel(); }

   private:
    WeightsStore& store_;
    ComponentRegistry& registry_;
  };

  ComponentRegistry registry_;
  Graph graph_;
  std::optional<Weights> weights_;
  std::optional<UsedWeights> user_;
};

}  // namespace kvferry::worker
