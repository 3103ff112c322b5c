// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/os/pool_memory.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "manager/catalogue_format.hpp"
#include "manager/host_pool.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::cache_manager {

/// Tells a pool's next manager what is in it: which slots hold which blocks, which slots somebody
/// may be writing, and who that may be. In shared memory, written as things happen, so that it is
/// right at whatever instruction this manager is killed.
/// @threading one thread. @lifetime the pool outlives what it is told of; detach it first.
class PoolCatalogue final : public PoolObserver {
 public:
  struct FoundBlock {
    ipc::Digest root;
    ipc::Digest block;
    ipc::Digest before;
    std::uint64_t summed_parts = 0;       ///< Whose checksums are known, a bit for each.
    std::optional<ipc::JobId> awaited{};  ///< Whose they would be; and which parts it stored.
    std::uint64_t parts = 0;
    std::uint32_t used = 0;  ///< The greater, the later.
  };
  struct FoundSlot {
    catalogue::BlockState state = catalogue::BlockState::kNone;
    std::uint16_t root = 0;  ///< Place of its root, of a visible block.
    std::uint32_t used = 0;
  };
  struct FoundSequence {
    std::string engine;
    ipc::Digest fingerprint;
    ipc::IncarnationId owner;
    std::uint64_t handle = 0;
    std::uint32_t index = 0;
    ipc::Digest root{};
  };
  struct FoundRoot {
    ipc::Digest root;
    ipc::Digest fingerprint;
    std::string engine;
    std::string name_space;              ///< Empty: not known.
    std::optional<ipc::Digest> proof{};  ///< NamespaceAccount::proof().
  };
  struct FoundUser {
    pid_t pid = 0;
    std::uint64_t start_time = 0;
    ipc::IncarnationId incarnation;
    catalogue::UserKind kind = catalogue::UserKind::kWorker;
  };

  /// Of a new pool, which holds nothing.
  [[nodiscard]] static ipc::Result<std::unique_ptr<PoolCatalogue>> create(
      const HostPool::Stats& pool, const ipc::Digest& id);
  /// Of a pool that another manager has left. kVersionMismatch, kProtocol: it is not what it should
  /// be; kInvalidArgument: of another size.
  [[nodiscard]] static ipc::Result<std::unique_ptr<PoolCatalogue>> open(
      const ipc::PoolMemory& memory, const HostPool::Stats& pool);

  [[nodiscard]] const ipc::UniqueFd& fd() const noexcept { return fd_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return mapping_.size_bytes(); }
  [[nodiscard]] const ipc::Digest& id() const noexcept { return id_; }

  /// Of the pool have memory.
  [[nodiscard]] std::uint64_t filled_bytes() const noexcept;
  void set_filled(std::uint64_t bytes) noexcept;
  /// When a manager took it last: of two pools that are left the later one is up to date.
  [[nodiscard]] std::uint64_t served_ns() const noexcept;
  void set_served(ipc::TimePoint when) noexcept;

  /// What an earlier manager wrote, as far as it is whole. Slabs by their first page; where they
  /// lie is for the pool to judge.
  [[nodiscard]] std::vector<SlabPlace> slabs() const;
  [[nodiscard]] std::vector<FoundRoot> roots() const;
  [[nodiscard]] std::vector<FoundUser> users() const;
  /// @pre on_slab_opened() with that slab; index < its capacity
  [[nodiscard]] catalogue::BlockState state(std::uint32_t slab, std::uint32_t index) const;
  /// Nothing where it is not visible.
  [[nodiscard]] std::optional<FoundBlock> find(const HostSlot& slot) const;
  /// The root in that place; zero: none.
  [[nodiscard]] const ipc::Digest& root_at(std::uint16_t place) const {
    return known_roots_[place].root;
  }
  /// Nothing where it is no part of a sequence.
  [[nodiscard]] std::optional<FoundSequence> find_sequence(const HostSlot& slot) const;

  /// A living process that may copy, until forget_user().
  void note_user(const ipc::ProcessRef& process,
                 const ipc::IncarnationId& incarnation,
                 catalogue::UserKind kind);
  void forget_user(const ipc::IncarnationId& incarnation);
  /// Whose root it is: blocks of a root that nobody has named are of no engine.
  void note_root(const FoundRoot& named);

  /// A slab that was found, and is not as the pool would have it.
  void forget_slab(std::uint32_t first_page);
  /// As state(), once for each slot that was found: a record whose root is not whole, or not of the
  /// slab's geometry, is emptied; of a damaged one somebody may be writing what it named.
  [[nodiscard]] FoundSlot adopt(std::uint32_t slab_id, std::uint32_t index);

  // PoolObserver
  void on_slab_opened(std::uint32_t id, const SlabPlace& place) override;
  void on_slab_closed(std::uint32_t id) override;
  void on_taken(const HostSlot& slot) override;
  void on_freed(const HostSlot& slot) override;
  void on_visible(const HostSlot& slot,
                  const ipc::BlockKey& key,
                  const ipc::Digest& before,
                  std::span<const std::uint64_t> sums) override;
  void on_hidden(const HostSlot& slot) override;
  void on_used(const HostSlot& slot, std::uint32_t when) override;

  /// What a slot holds was stored by that job, those parts of it, and has no checksums yet.
  void on_awaited(const HostSlot& slot, ipc::JobId job, std::uint64_t parts);
  /// The checksums of what a slot holds.
  void on_summed(const HostSlot& slot, std::span<const std::uint64_t> sums);
  /// Empty: not known.
  [[nodiscard]] std::span<const std::uint64_t> sums(const HostSlot& slot) const;
  /// Records of roots and blocks that were not what they had been, as far as they were looked at.
  [[nodiscard]] std::uint64_t damaged() const noexcept { return damaged_; }
  /// Visible blocks without them.
  [[nodiscard]] std::uint64_t unsummed() const noexcept { return unsummed_; }

  /// A taken slot holds a part of that sequence, of a client whose keys begin with root.
  void on_sequence(const HostSlot& slot,
                   const ipc::Digest& root,
                   const ipc::IncarnationId& owner,
                   std::uint64_t handle,
                   std::uint32_t index);

 private:
  struct Area {
    std::byte* records = nullptr;  ///< Null: its blocks are too small to be recorded.
    std::uint64_t stride = 0;
    std::uint32_t first_page = 0;
    std::uint32_t sums = 0;
    std::uint32_t sums_of_part = 0;
    ipc::Digest fingerprint{};
  };

  struct Memory {
    ipc::UniqueFd fd;
    ipc::SharedMapping mapping;
    ipc::Digest id;
    HostPool::Stats pool;
  };

  explicit PoolCatalogue(Memory memory);
  template <typename T> [[nodiscard]] T* at(std::uint64_t offset) const noexcept {
    return reinterpret_cast<T*>(mapping_.data() + offset);
  }
  [[nodiscard]] catalogue::User* user(std::uint32_t i) const noexcept {
    return at<catalogue::User>(layout_.users) + i;
  }
  [[nodiscard]] catalogue::Root* root(std::uint32_t i) const noexcept {
    return at<catalogue::Root>(layout_.roots) + i;
  }
  [[nodiscard]] catalogue::Slab* slab(std::uint32_t page) const noexcept {
    return at<catalogue::Slab>(layout_.slabs) + page;
  }
  [[nodiscard]] catalogue::Block* block(const HostSlot& slot) const noexcept;
  [[nodiscard]] std::uint64_t seed(const void* record) const noexcept;
  template <typename T> [[nodiscard]] bool is_whole(const T& record) const noexcept;
  template <typename T> void seal(T& record) noexcept;
  /// Of a record, whose memory is also others': taken, then looked at.
  struct RecordCopy {
    catalogue::Block record;
    std::array<std::uint64_t, catalogue::kMostSums> sums;  ///< As many as its slab's have.
  };
  static void copy_record(const catalogue::Block& record, std::uint32_t sums, RecordCopy& copy);
  /// Of what a copy says in that record's place.
  [[nodiscard]] std::uint64_t check_of(RecordCopy& copy,
                                       std::uint32_t sums,
                                       const catalogue::Block& record) const noexcept;
  /// False: there is none, or it is not whole.
  [[nodiscard]] bool read_record(const HostSlot& slot, RecordCopy& copy) const;
  [[nodiscard]] bool is_whole_at(const HostSlot& slot) const;
  [[nodiscard]] bool names_root(const catalogue::Block& record) const {
    return record.root < catalogue::kRoots && !known_roots_[record.root].root.is_zero();
  }
  [[nodiscard]] std::optional<std::uint16_t> root_id(const ipc::Digest& digest);
  [[nodiscard]] const catalogue::Root* root_of(const catalogue::Block& record) const;
  static void store_check(std::uint64_t& check, std::uint64_t value) noexcept;
  /// @pre its check is stored as 0
  void seal_block(const HostSlot& slot, catalogue::Block& record);
  void let_root_go(const catalogue::Block& record);
  /// Around each change of a record: what it is for unsummed().
  [[nodiscard]] static bool lacks_sums(const catalogue::Block& record) noexcept {
    return record.state == catalogue::BlockState::kVisible &&
           record.sums != catalogue::SumsState::kKnown;
  }
  void count(bool lacked, const catalogue::Block& record) noexcept;

  /// What a root's record says, as it was when it was found whole or written.
  struct KnownRoot {
    ipc::Digest root;  ///< Zero: there is none.
    ipc::Digest fingerprint;
  };
  void know_root(std::uint32_t place);

  const ipc::UniqueFd fd_;
  const ipc::SharedMapping mapping_;
  const ipc::Digest id_;
  const std::uint32_t pages_;
  const catalogue::Layout layout_;
  std::vector<Area> areas_;  ///< By slab.
  /// Places of roots, and how many blocks each has, of sequences, too.
  std::unordered_map<ipc::Digest, std::uint16_t> root_ids_;
  std::vector<KnownRoot> known_roots_;
  std::vector<std::uint64_t> blocks_of_root_;
  std::map<ipc::IncarnationId, std::uint32_t> user_places_;
  bool is_full_told_ = false;
  std::uint64_t unsummed_ = 0;
  std::uint64_t damaged_ = 0;
};

}  // namespace kvferry::cache_manager
