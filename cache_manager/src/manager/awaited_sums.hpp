// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "manager/host_pool.hpp"
#include "manager/job_table.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// Puts the checksums together that the movers of all ranks tell of a store: some time after it was
/// answered, or before the other ranks have answered, or never. @threading one thread.
class AwaitedSums {
 public:
  /// Of so many blocks they are awaited, and of so many jobs; the oldest job is given up for the
  /// next one, and its blocks stay among PoolCatalogue::unsummed(). A mover has no more parts to
  /// compute (PoolChecks).
  static constexpr std::size_t kMostBlocks = std::size_t{1} << 17;
  static constexpr std::size_t kMostJobs = std::size_t{1} << 15;

  /// SlabShape::sums(): part by part, of what the ranks share, then of each rank's bytes; zeros for
  /// a part that was not stored. The slot still holds what was.
  using OnKnown = std::function<void(const HostSlot&, const std::vector<std::uint64_t>&)>;

  explicit AwaitedSums(OnKnown on_known) : on_known_(std::move(on_known)) {}

  /// The job has ended, some of it well.
  void add(const Job& job, const HostPool& pool);
  /// By a rank's mover. is_under_way: the job has not ended on every rank; else what is not awaited
  /// counts for nothing.
  void told(std::uint32_t rank, ipc::MoverSums sums, bool is_under_way);
  /// Jobs of which some rank has not told.
  [[nodiscard]] std::size_t jobs() const noexcept { return jobs_.size(); }

 private:
  struct Block {
    std::weak_ptr<const HostBlock> block;
    std::vector<std::uint64_t> sums;  ///< 0: not told.
    std::size_t left = 0;             ///< Of them that will be told.
  };
  /// One item of a mover's message.
  struct Sent {
    std::uint32_t block = 0;
    std::uint32_t first_sum = 0;  ///< Of its part: of what the ranks share.
  };
  struct Awaited {
    std::vector<Block> blocks;
    /// Of each rank: what its mover's message named, in that order. Emptied when told.
    std::vector<std::vector<Sent>> sent;
    std::size_t ranks_left = 0;
    std::map<std::uint32_t, ipc::MoverSums> early;  ///< By rank.
    bool has_ended = false;
  };

  [[nodiscard]] Awaited& open(ipc::JobId job);
  static void await_part(Awaited& awaited,
                         const Sent& sent,
                         const Job& job,
                         const JobItem& item,
                         const SlabShape& shape);
  void apply(Awaited& awaited, std::uint32_t rank, const ipc::MoverSums& sums);
  void erase(ipc::JobId job);
  void erase_if_over(ipc::JobId job);

  OnKnown on_known_;
  std::unordered_map<ipc::JobId, Awaited> jobs_;
  std::deque<ipc::JobId> order_;  ///< Of their coming; some may be over.
  std::size_t blocks_ = 0;        ///< Of all of them.
};

}  // namespace kvferry::cache_manager
