// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "kvferry/worker/weights_import.hpp"
#include "model_tables.hpp"
#include "safetensors.hpp"
#include "weights_broadcast.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvferry::worker {

/// This rank's part of a tensor, in device memory: its rows when they can be dealt out evenly to
/// all ranks, else all of it.
struct LoadedTensor {
  std::string name;
  std::string shape;     ///< describe() of the whole tensor.
  ScratchBuffer memory;  ///< None while it is released or offloaded.
  std::uint64_t size_bytes = 0;
  std::vector<std::byte> host{};  ///< What it holds, while it is offloaded.
};

/// The reference worker's weights: the tensors of a safetensors file. An update reads its file into
/// host memory and checks it there; the commit copies into the device memory of the tensors in use,
/// which stay where they are (a captured graph goes on with them), and packs them for the model, so
/// that it can fail only with the device. That memory is made by the first load, before its commit;
/// the transient memory that packing takes, by each load, in sizes of its own: what a caching
/// allocator keeps of it grows with every update, until somebody empties it.
///
/// The model computes with what was packed. Between two uses the tensors themselves can therefore
/// be in host memory: with kOffloaded after give_up(), which the next load takes back; with
/// kLayerwise always, and a commit has one of them at a time on the device.
/// @threading as WeightsUser; tensors() while no commit() runs; device_bytes(): any.
class WeightsStore final : public ipc::WeightsUser {
 public:
  /// Throws Exception when the device refuses a stream or pinned memory.
  /// replicated: some of what the model writes is the same on all ranks, and so has to depend on
  /// what all of them know: on all of the weights. broadcasts: whether rank 0 may hand them on so.
  WeightsStore(ipc::Device& device,
               CachingAllocator& allocator,
               ModelTables& tables,
               ipc::Rank rank,
               std::uint32_t ranks,
               bool replicated,
               ipc::ComponentStrategy strategy = ipc::ComponentStrategy::kResident,
               bool broadcasts = true);
  WeightsStore(const WeightsStore&) = delete;
  WeightsStore& operator=(const WeightsStore&) = delete;
  ~WeightsStore() override;

  [[nodiscard]] ipc::Result<std::uint64_t> prepare(const ipc::WeightsSource& source,
                                                   ipc::Deadline deadline) override;
  [[nodiscard]] ipc::Result<ipc::BroadcastPort> broadcast_port() override;
  [[nodiscard]] ipc::Result<ipc::BroadcastId> open_broadcast(const std::string& file,
                                                             bool again) override;
  [[nodiscard]] ipc::Result<std::uint64_t> prepare_broadcast(const ipc::BroadcastId& id,
                                                             ipc::Deadline deadline) override;
  [[nodiscard]] ipc::Status commit(ipc::Deadline deadline) override;
  void abandon() override;
  void cancel() noexcept override { cancelled_.store(true); }

  /// Gives the device memory of tensors and tables up; kHost: what they hold stays in host memory.
  /// After an error everything is as it was. Returns the bytes. @pre nothing computes with them
  [[nodiscard]] ipc::Result<std::uint64_t> release(ipc::WeightsBackup kind, ipc::Deadline deadline);
  /// Takes that memory again, and fills it from the backup; without one nothing computes before the
  /// next commit. After an error they are still released. Returns the bytes.
  [[nodiscard]] ipc::Result<std::uint64_t> resume(ipc::Deadline deadline);

  /// Moves the tensors to host memory, when the strategy says so and they are on the device. kBusy
  /// while an update is prepared. After an error they are where they were.
  [[nodiscard]] ipc::Status give_up(ipc::Deadline deadline);
  [[nodiscard]] ipc::ComponentStrategy strategy() const noexcept { return strategy_; }
  /// Of the tensors, without what is packed.
  [[nodiscard]] std::uint64_t device_bytes() const noexcept { return device_bytes_.load(); }

  [[nodiscard]] const std::vector<LoadedTensor>& tensors() const noexcept { return tensors_; }

 private:
  struct Prepared {
    std::string name;
    std::string shape;
    std::vector<std::byte> bytes;
    ScratchBuffer memory;  ///< Of the first load alone; later ones go into what is there.
    ScratchBuffer transient;
    std::uint64_t size_bytes = 0;   ///< Without bytes: so many lie at the transient's start.
    std::vector<std::byte> host{};  ///< Layer by layer: room for what is lent.
  };
  /// What of a tensor is this rank's.
  struct Share {
    std::uint64_t size_bytes = 0;
    std::uint64_t start = 0;  ///< In the tensor.
  };
  struct Load {
    std::vector<Prepared> parts;
    /// What is written depends on it, where that is to be the same on all ranks.
    std::vector<std::uint64_t> shared_table;
    ScratchBuffer folded;  ///< Where it comes about, when it does on the device.
    std::uint64_t folds = 0;
    // Of a load layer by layer, for one tensor after another; the transient not of one that is
    // lent, whose tensors lie in transients of their own.
    ScratchBuffer layer;
    ScratchBuffer layer_transient;
  };
  struct Backup {
    std::vector<std::vector<std::byte>> tensors;
    std::vector<std::byte> tables;
  };
  struct Released {
    std::optional<Backup> backup;
  };
  static constexpr std::uint64_t kBounceBytes = 8ULL << 20;
  /// Between two looks at deadline and cancellation.
  static constexpr std::uint64_t kReadBytes = 4ULL << 20;

  // weights_store_offload.cpp
  [[nodiscard]] bool is_layerwise() const noexcept {
    return strategy_ == ipc::ComponentStrategy::kLayerwise;
  }
  /// Whether a load has to take memory for the tensors themselves: the first one, and one of
  /// tensors that were given up.
  [[nodiscard]] bool lacks_memory() const noexcept {
    return !is_layerwise() && (tensors_.empty() || offloaded_);
  }
  [[nodiscard]] ipc::Status make_layer(Load& load, bool with_transient);
  [[nodiscard]] static ipc::Status make_room(std::vector<std::byte>& host,
                                             const std::string& name,
                                             std::uint64_t size_bytes);
  [[nodiscard]] ipc::Status keep_on_host(std::size_t tensor,
                                         ipc::DevicePtr from,
                                         ipc::Deadline deadline);
  void note_device_bytes();
  // weights_store_release.cpp
  /// Of tensors and tables, on the device when they are not released.
  [[nodiscard]] std::uint64_t total_bytes() const;
  [[nodiscard]] ipc::Result<Backup> back_up(ipc::Deadline deadline);
  [[nodiscard]] ipc::Status restore(const Load& load, const Backup& backup, ipc::Deadline deadline);
  [[nodiscard]] ipc::Status copy_out(ipc::DevicePtr from,
                                     std::span<std::byte> to,
                                     ipc::Deadline deadline);
  // weights_store_ipc.cpp
  [[nodiscard]] ipc::Result<std::uint64_t> prepare_lent(const std::string& socket,
                                                        ipc::Deadline deadline);
  [[nodiscard]] ipc::Result<std::uint64_t> take_lent(const std::vector<TensorInfo>& tensors,
                                                     ipc::Deadline deadline);
  [[nodiscard]] ipc::Status fold_lent(const std::vector<TensorInfo>& tensors, Load& load);
  // Of those that come on the device.
  [[nodiscard]] ipc::Status add_part(const TensorInfo& tensor, Load& load);
  [[nodiscard]] ipc::Status start_folding(Load& load);
  [[nodiscard]] ipc::Status fold_piece(ipc::DevicePtr piece, std::uint64_t size_bytes, Load& load);
  [[nodiscard]] ipc::Status read_folded(Load& load, ipc::Deadline deadline);
  // weights_store_broadcast.cpp
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::BroadcastGroup>> group_for(
      const ipc::BroadcastId& id, const ipc::BroadcastWait& wait);
  void drop_group();
  void leave_broadcast();
  [[nodiscard]] ipc::Result<std::uint64_t> take_broadcast(const ipc::BroadcastWait& wait);
  [[nodiscard]] ipc::Result<std::uint64_t> take_broadcast_safely(const ipc::BroadcastWait& wait);
  [[nodiscard]] ipc::Status take_pieces(const TensorInfo& tensor,
                                        const Prepared& part,
                                        Load& load,
                                        const ipc::BroadcastWait& wait);

  [[nodiscard]] ipc::Status check_not_released() const;
  [[nodiscard]] Share share_of(const TensorInfo& tensor) const;

  [[nodiscard]] ipc::Status check_same(const std::vector<TensorInfo>& tensors,
                                       const std::string& place) const;
  [[nodiscard]] ipc::Result<Prepared> read_part(const SafetensorsFile& file,
                                                const TensorInfo& tensor,
                                                ipc::Deadline deadline) const;
  [[nodiscard]] ipc::Status fold_whole(const SafetensorsFile& file,
                                       ipc::Deadline deadline,
                                       std::vector<std::uint64_t>& table) const;
  [[nodiscard]] ipc::Status check_time(const TensorInfo& tensor,
                                       std::uint64_t done,
                                       ipc::Deadline deadline) const;
  [[nodiscard]] std::uint64_t transient_bytes(std::size_t tensor, std::uint64_t size_bytes) const;
  void place_tensors(Load& load);
  [[nodiscard]] ipc::Status load_tensor(Load& load,
                                        std::size_t tensor,
                                        ipc::DevicePtr tables,
                                        ipc::Deadline deadline);
  [[nodiscard]] ipc::Status finish_tables(const Load& load,
                                          ipc::DevicePtr tables,
                                          ipc::Deadline deadline);
  [[nodiscard]] ipc::Status let_go_of_last();
  [[nodiscard]] ipc::Status copy(std::span<const std::byte> from,
                                 ipc::DevicePtr to,
                                 ipc::Deadline deadline);

  ipc::Device& device_;
  CachingAllocator& allocator_;
  const ipc::Rank rank_;
  const std::uint32_t ranks_;
  const bool shares_table_;
  const ipc::ComponentStrategy strategy_;
  const bool broadcasts_;
  ModelTables& tables_;
  std::uint64_t loads_ = 0;
  ipc::EventFd copied_;
  std::unique_ptr<ipc::PinnedBuffer> bounce_;
  Load prepared_;
  Load committing_;  ///< Stays until its work was seen to end: the stream writes into it.
  std::optional<WeightsImport> loan_;               ///< As committing_: the stream reads from it.
  std::optional<WeightsBroadcast::Opened> opened_;  ///< Until it is prepared from. Rank 0 alone.
  std::unique_ptr<WeightsBroadcast> broadcast_;     ///< As loan_.
  std::unique_ptr<ipc::BroadcastGroup> group_;      ///< Of the last update, a broadcast.
  ipc::BroadcastId group_id_;
  std::vector<LoadedTensor> tensors_;
  bool offloaded_ = false;  ///< tensors_ are in host memory; their memory is not taken.
  std::optional<Released> released_;
  std::atomic<std::uint64_t> device_bytes_{0};
  std::atomic<bool> cancelled_{false};
  std::unique_ptr<ipc::Stream> stream_;  ///< Last: ends before what it works on.
};

}  // namespace kvferry::worker
