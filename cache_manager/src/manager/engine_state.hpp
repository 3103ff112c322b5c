// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/host_pool.hpp"
#include "manager/job_table.hpp"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// A worker or mover as the manager knows it.
struct RankPeer {
  ipc::IncarnationId id;
  pid_t pid = 0;
  bool connected = true;  ///< False: silent, alive as far as proven.
  ipc::RankState state;   ///< The latest; vacant before the first.
};

struct RankRecord {
  std::optional<RankPeer> worker;
  std::optional<RankPeer> mover;
  /// Reported cleared: a state report of that epoch that was on its way does not revive it.
  ipc::SessionId cleared_session;
  ipc::Epoch cleared_epoch;
  /// The worker that was seen to run nothing of any mover but this one.
  ipc::IncarnationId settled_worker;
  ipc::IncarnationId settled_mover;
};

/// A mover and the worker whose staging agent it uses.
struct RankPair {
  ipc::IncarnationId mover;
  ipc::IncarnationId worker;
  friend auto operator<=>(const RankPair&, const RankPair&) = default;
};

/// Fixed by the first worker or mover that registers, held against all others.
struct EngineConfig {
  ipc::Geometry geometry;
  ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  ipc::CacheOwner cache_owner = ipc::CacheOwner::kWorker;
  ipc::Digest fingerprint;
  std::vector<SlabShape> shapes;      ///< Per group.
  std::vector<ipc::GroupRule> rules;  ///< Likewise.
};

enum class EngineOperation : std::uint8_t {
  kNone,
  kClear,
  kReinit,
  kPause,
  kContinue,
  kFlush,
  kUpdateWeights,
  kRelease,
  kResume
};
[[nodiscard]] std::string_view to_string(EngineOperation operation) noexcept;
/// Nothing of the arena changes in it until it commits.
[[nodiscard]] constexpr bool is_generation_operation(EngineOperation operation) noexcept {
  return operation == EngineOperation::kPause || operation == EngineOperation::kContinue ||
         operation == EngineOperation::kFlush || operation == EngineOperation::kUpdateWeights ||
         operation == EngineOperation::kRelease || operation == EngineOperation::kResume;
}

/// Its schedulers are held until it is over.
[[nodiscard]] constexpr bool holds_while_it_runs(EngineOperation operation) noexcept {
  return operation == EngineOperation::kFlush || operation == EngineOperation::kUpdateWeights ||
         operation == EngineOperation::kRelease;
}

/// One engine: its ranks' processes, and what follows from their reports. @threading one thread.
class EngineRecord {
 public:
  EngineRecord(std::string name, std::uint32_t id) : name_(std::move(name)), id_(id) {}

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::uint32_t id() const noexcept { return id_; }
  [[nodiscard]] const std::optional<EngineConfig>& config() const noexcept { return config_; }
  [[nodiscard]] const std::vector<RankRecord>& ranks() const noexcept { return ranks_; }
  [[nodiscard]] EngineOperation operation() const noexcept { return operation_; }
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] ipc::CachePhase phase() const noexcept { return phase_; }
  [[nodiscard]] bool offload_ready() const noexcept { return offload_ready_; }
  [[nodiscard]] const std::vector<std::uint32_t>& group_blocks() const noexcept {
    return group_blocks_;
  }
  [[nodiscard]] ipc::EngineState view() const;

  /// Takes a worker or mover in. kGeometryMismatch, kRoleConflict, kAlreadyExists (the rank has a
  /// living, connected one), kInvalidArgument.
  [[nodiscard]] ipc::Status admit(const ipc::Peer& peer, const ipc::RankHello& hello);
  /// kProtocol from a peer that is not registered here.
  [[nodiscard]] ipc::Status report(const ipc::IncarnationId& peer, const ipc::RankState& state);
  void set_connected(const ipc::IncarnationId& peer, bool connected);
  void remove(const ipc::IncarnationId& peer);
  [[nodiscard]] bool has_rank_peers() const;
  [[nodiscard]] RankPeer* find(const ipc::IncarnationId& peer);

  /// Owner and attacher of a rank by the configured role; null when not registered.
  [[nodiscard]] const RankPeer* owner(std::uint32_t rank) const;
  [[nodiscard]] const RankPeer* attacher(std::uint32_t rank) const;
  /// The rank's worker has its arena mapped, and the owner lives.
  [[nodiscard]] bool rank_ready(std::uint32_t rank) const;
  [[nodiscard]] bool rank_offload_ready(std::uint32_t rank) const;
  /// Not ready, and yet every rank's owner keeps the contents that this generation stands for: they
  /// wait for a worker.
  [[nodiscard]] bool waits_for_worker() const;
  /// Ranks that lack nothing for offload but the proof that their worker runs nothing for any other
  /// mover: one that died while no manager was there, say.
  [[nodiscard]] std::vector<RankPair> unsettled() const;
  void note_settled(const RankPair& pair);
  [[nodiscard]] std::optional<std::uint32_t> rank_of_mover(const ipc::IncarnationId& mover) const;
  /// That proof has been given for this worker.
  [[nodiscard]] bool is_settled_worker(const ipc::IncarnationId& worker) const;

  /// The pause that was ordered and not ended.
  [[nodiscard]] std::optional<ipc::PauseMode> paused() const noexcept { return paused_; }
  /// By a user's command, or under weights that may not belong together: nothing that a scheduler
  /// comes with later holds against it.
  void set_paused(std::optional<ipc::PauseMode> mode) {
    put_pause(mode, /*by_release=*/false);
    user_has_spoken_ = true;
    earlier_release_ = false;
  }
  /// A release holds what an idle engine would start; its last resume lets it run again.
  void pause_for_release() { put_pause(ipc::PauseMode::kRetract, /*by_release=*/true); }
  /// Leaves a user's pause that has come to light meanwhile.
  void end_release_pause() {
    if (!paused_by_release_) return;
    put_pause(std::nullopt, /*by_release=*/false);
    earlier_release_ = false;
  }
  [[nodiscard]] bool paused_by_release() const noexcept { return paused_by_release_; }
  /// A scheduler has come with a pause that an earlier manager ordered: it holds unless this
  /// manager has been told otherwise since. A user's holds against a release's, whose schedulers
  /// may not have heard of it before that manager died.
  void adopt_pause(std::optional<ipc::PauseMode> mode, bool by_release);
  /// Whether this manager has been told, by a command or by a scheduler that came with one.
  [[nodiscard]] bool pause_is_known() const noexcept { return pause_is_known_; }

  /// Of the weights that all ranks' workers compute with; zero when they name none. While a rank
  /// has no worker, the last one known.
  [[nodiscard]] const ipc::Digest& weights() const noexcept { return weights_; }
  /// Why ranks may compute with weights that do not belong together; nothing when they do.
  [[nodiscard]] const std::optional<ipc::Error>& mixed_weights() const noexcept { return mixed_; }
  void set_mixed_weights(std::optional<ipc::Error> why) { mixed_ = std::move(why); }

  /// Released on any rank. The cache: by a release, or cleared.
  [[nodiscard]] ipc::MemoryTags released() const;
  /// Of that, what nothing can be computed without.
  [[nodiscard]] ipc::MemoryTags held_back() const;
  /// A rank's weights were released without a backup, and not updated since.
  [[nodiscard]] bool weights_lost() const;
  /// It was paused for a release alone, and lacks nothing to compute with.
  [[nodiscard]] bool release_pause_may_end() const {
    return paused_by_release_ && held_back().empty() && !weights_lost() && !mixed_;
  }
  void note_cache_released() { cache_released_ = true; }

  void begin(EngineOperation operation) {
    operation_ = operation;
    clearing_ = operation == EngineOperation::kClear;
  }
  /// succeeded: on every rank; a failed operation leaves what the ranks report.
  void end_operation(bool succeeded);
  /// A clear, or a re-init that was done, as a part of the operation that runs.
  void begin_clear() { clearing_ = true; }
  void end_clear(bool succeeded);
  void count_reinit() { ++reinits_; }
  [[nodiscard]] std::uint64_t clears() const noexcept { return clears_; }
  [[nodiscard]] std::uint64_t reinits() const noexcept { return reinits_; }
  [[nodiscard]] std::uint64_t flushes() const noexcept { return flushes_; }
  [[nodiscard]] std::uint64_t updates() const noexcept { return updates_; }
  /// The peer answered a clear: whatever it reports of that epoch later is old.
  void note_cleared(std::uint32_t rank, ipc::SessionId session, ipc::Epoch epoch);
  /// The owner's latest epoch has been cleared, by that answer.
  [[nodiscard]] bool is_cleared(std::uint32_t rank) const;
  void set_note(std::string note) { note_ = std::move(note); }
  /// A process that the engine has no place for; until forget_turned_away() tells of its death.
  void note_turned_away(const ipc::IncarnationId& peer) { turned_away_.insert(peer); }
  void forget_turned_away(const ipc::IncarnationId& peer) { turned_away_.erase(peer); }
  /// Who was last turned away, and why: for people who look for it.
  void set_refusal(std::string refusal) { refusal_ = std::move(refusal); }
  [[nodiscard]] const std::string& refusal() const noexcept { return refusal_; }

  /// Derives phase, readiness and generation from the reports; true when any of it, or the worker
  /// of a ready rank, changed.
  /// next_generation is raised when a new generation begins.
  [[nodiscard]] bool refresh(std::uint64_t& next_generation);

  /// Where jobs of a generation go; kNotReady, kStaleEpoch or kRevoked otherwise.
  [[nodiscard]] ipc::Result<std::vector<RankTarget>> targets(std::uint64_t generation) const;

 private:
  /// Every rank's owner lives and has ended its epoch without making another one.
  [[nodiscard]] bool all_epochs_ended() const;
  [[nodiscard]] ipc::Digest weights_of_ranks() const;
  /// The contents of a rank's device blocks: the generation is theirs. Not the worker's: contents
  /// that a mover owns outlive it.
  struct Contents {
    ipc::SessionId session;
    ipc::Epoch epoch;
    ipc::LeaseId prepared_by;
    friend bool operator==(const Contents&, const Contents&) = default;
  };

  void put_pause(std::optional<ipc::PauseMode> mode, bool by_release) {
    paused_ = mode;
    paused_by_release_ = by_release;
    pause_is_known_ = true;
  }
  [[nodiscard]] ipc::Status fix_config(const ipc::RankHello& hello, const ipc::Digest& fingerprint);
  [[nodiscard]] bool rank_connected(std::uint32_t rank) const;
  [[nodiscard]] static bool is_mapped(const RankRecord& rank, const std::optional<RankPeer>& peer);

  std::string name_;
  std::uint32_t id_;
  std::optional<EngineConfig> config_;
  std::vector<RankRecord> ranks_;
  std::vector<Contents> mapped_;             ///< Per rank, the last that its worker had mapped.
  std::vector<ipc::IncarnationId> workers_;  ///< Per rank, who had them mapped last.
  EngineOperation operation_ = EngineOperation::kNone;
  ipc::Digest weights_;
  std::optional<ipc::Error> mixed_;
  std::uint64_t updates_ = 0;  ///< Of weights, that were done.
  std::optional<ipc::PauseMode> paused_;
  bool pause_is_known_ = false;  ///< Ordered, ended or adopted by this manager.
  bool user_has_spoken_ =
      false;                   ///< This manager has been told whether it is paused, by a command.
  std::uint64_t flushes_ = 0;  ///< Those that were done.
  std::uint64_t clears_ = 0;   ///< Clears of all ranks that had something to clear.
  std::uint64_t reinits_ = 0;  ///< Re-inits that made the cache ready.
  bool paused_by_release_ = false;
  bool earlier_release_ = false;  ///< A scheduler came with the pause of an earlier manager's.
  bool cache_released_ = false;   ///< And not re-created since.
  bool clearing_ = false;
  bool cleared_ = false;
  std::uint64_t generation_ = 0;
  ipc::CachePhase phase_ = ipc::CachePhase::kDetached;
  bool offload_ready_ = false;
  std::vector<std::uint32_t> group_blocks_;
  std::string note_;
  std::string refusal_;
  std::set<ipc::IncarnationId> turned_away_;
};

[[nodiscard]] std::string_view to_string(ipc::CachePhase phase) noexcept;

}  // namespace kvferry::cache_manager
