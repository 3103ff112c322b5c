// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/lease/arena_source.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/home_process.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/worker/arena_use.hpp"
#include "kvferry/worker/copy_budget.hpp"
#include "kvferry/worker/layer_words.hpp"

#include <functional>
#include <memory>

/// For the GPU process of a serving engine: its memory takes part in store, load, clear and re-init
/// without being allocated by kvferry.
namespace kvferry::worker {

/// What an engine's worker is told.
struct WorkerHooks {
  /// The epoch is about to be cleared: end what is queued and let go of every ArenaUse soon.
  /// enter() is refused already. On the lease thread; must not wait for what a clear waits for.
  std::function<void()> on_revoked;
  /// Part of every clear, after the arena is gone, whatever its outcome, and of continue and flush
  /// unless their caller says no: empty the caching allocator of everything but the arena's memory
  /// (torch.cuda.empty_cache, say), and tell what it had reserved before and has after. On
  /// threads of kvferry's, maybe on two at a time; steps may run meanwhile.
  ipc::EmptyAllocator empty_allocator;
  /// The weights that this worker computes with, for `kvferry update-weights`; null when they are
  /// no matter of kvferry's. weights_id: their identity at the start; zero for fresh random bytes,
  /// unless it is known that another life had the very same. It is part of the key of every block.
  ipc::WeightsUser* weights = nullptr;
  ipc::Digest weights_id{};
  /// The device memory beside the arena that `kvferry release` gives up and `kvferry resume` takes
  /// back; null for none: then the cache alone can be released.
  ipc::MemoryUser* memory = nullptr;
  /// What else has device memory, for `kvferry components`: a ComponentRegistry (components.hpp),
  /// or the engine's own list; null for none.
  ipc::ComponentUser* components = nullptr;
  /// What copies may take of the device's multiprocessors.
  CopyBudget copies{};
  /// This worker cannot go on: refused for a reason that no retry can mend (role, geometry,
  /// version), or its device failed. Its process should end. Any thread.
  std::function<void(const ipc::Error&)> on_fatal;
};

/// One rank's worker, registered: it serves attaching movers (lease handshake), gathers and
/// scatters for them (staging agent), and obeys the manager's clears and re-inits. It looks for the
/// manager, and for the next one after it died, by itself; without one it goes on serving the
/// arena.
///
/// States, as view() shows them: Ready (mapped; enter() gives permission) → Revoking (enter() says
/// kNotReady) → Cleared, or Quarantined when memory could not be proven let go → Ready with the
/// next epoch, at addresses of the engine's choice.
/// @threading enter(), view(): any; the others one at a time.
/// @lifetime device, regions and what the hooks use outlive it.
class RegisteredWorker {
 public:
  /// regions: null when kvferry is to allocate (or, with --cache-owner mover, to map) the arena.
  /// Throws Exception when this rank has a living worker or the device refuses a stream.
  RegisteredWorker(ipc::Device& device,
                   const ipc::RankConfig& identity,
                   ipc::ArenaSource* regions,
                   WorkerHooks hooks);
  RegisteredWorker(const RegisteredWorker&) = delete;
  RegisteredWorker& operator=(const RegisteredWorker&) = delete;
  ~RegisteredWorker();

  /// Takes part from now on: asks regions for the first epoch, looks for movers and the manager.
  /// Once; what uses enter() and what the hooks use stands before. Throws Exception; see
  /// register_worker().
  void start();

  /// For a step that runs on the arena now, or on this epoch only. kNotReady while nothing is
  /// mapped or a clear runs, kStaleEpoch for another session or epoch.
  [[nodiscard]] ipc::Result<ArenaUse> enter();
  [[nodiscard]] ipc::Result<ArenaUse> enter(const ipc::SessionId& session, ipc::Epoch epoch);

  /// By which steps and layer-wise loads and stores go together.
  [[nodiscard]] LayerWords& layers() noexcept;

  /// To be told when the device computes, step by step: copies that would cost it something go
  /// another way then. A worker that never tells is copied for as if it did not.
  [[nodiscard]] ipc::ComputeActivity& activity() noexcept;

  [[nodiscard]] ipc::LeaseView view() const;

  /// Ends the arena (a bounded clear) and says bye to the manager; enter() is refused from then on,
  /// and no hook is called any more. When view() still shows quarantined_bytes afterwards, their
  /// tensors must not be freed before the process ends: a peer maps them. Twice is harmless.
  void close();

 private:
  class Impl;
  ipc::HomeProcess home_;
  std::unique_ptr<Impl> impl_;
};

/// Makes and starts a worker whose KV tensors are its own. identity: names, rank, roles and the
/// geometry, which says the groups and their regions; regions: where they lie, asked for the first
/// epoch before this returns. Errors: kInvalidArgument (regions that do not fit the geometry, the
/// device or the kind of handles, naming region, both values and remedy; --cache-owner mover),
/// kAlreadyExists (a living worker of this rank), and what regions.allocate() says. Only its
/// kNoDeviceMemory may be no error yet: an earlier life's memory can be pinned for a while, and the
/// worker returned asks again until view() shows Ready, or ends through on_fatal.
[[nodiscard]] ipc::Result<std::unique_ptr<RegisteredWorker>> register_worker(
    ipc::Device& device,
    const ipc::RankConfig& identity,
    ipc::ArenaSource& regions,
    WorkerHooks hooks = {});

}  // namespace kvferry::worker
