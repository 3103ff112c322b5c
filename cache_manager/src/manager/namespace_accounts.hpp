// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/namespace_quota.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// Blocks among which eviction chooses: of one namespace with a quota, or of all without one.
struct Partition {
  std::uint32_t id = 0;
  std::uint64_t soft = 0;      ///< Share; 0: none.
  std::uint64_t expected = 0;  ///< Bytes that it may well have.
  std::uint64_t bytes = 0;     ///< That it has, of which others may take
  std::uint64_t cached = 0;    ///< Of these, of visible blocks that nobody pins.
  [[nodiscard]] std::uint64_t above_share() const noexcept {
    return bytes > soft ? bytes - soft : 0;
  }
};

/// What a namespace has of the host pool: each slot that is held for it counts, from the moment
/// that it is taken until nobody holds it any more. So do reservations, blocks that are dropped and
/// still being read, and swapped-out sequences of its clients. @threading one thread.
class NamespaceAccount {
 public:
  struct Counters {
    std::uint64_t hits = 0;                ///< Blocks that loads asked for and that were there,
    std::uint64_t misses = 0;              ///< and that were not.
    std::uint64_t stored = 0;              ///< Blocks that became visible.
    std::uint64_t evicted = 0;             ///< For whomever,
    std::uint64_t evicted_for_others = 0;  ///< and of those for another namespace.
    std::uint64_t refused_quota = 0;       ///< Blocks for which its hard limit had no room,
    std::uint64_t refused_room = 0;        ///< and for which the pool had none.
  };
  struct Limits {
    std::uint64_t soft = 0;
    std::uint64_t hard = std::numeric_limits<std::uint64_t>::max();
    friend bool operator==(const Limits&, const Limits&) = default;
  };

  /// @lifetime the partition outlives it
  NamespaceAccount(std::string name, const Limits& limits, Partition& partition)
      : name_(std::move(name)), limits_(limits), partition_(partition) {}
  NamespaceAccount(const NamespaceAccount&) = delete;
  NamespaceAccount& operator=(const NamespaceAccount&) = delete;
  ~NamespaceAccount() = default;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const Limits& limits() const noexcept { return limits_; }
  [[nodiscard]] bool has_key() const noexcept { return proof_.has_value(); }
  /// What the next manager can tell the key by.
  [[nodiscard]] const std::optional<ipc::Digest>& proof() const noexcept { return proof_; }
  [[nodiscard]] const Partition& partition() const noexcept { return partition_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] bool has_room_for(std::uint64_t bytes) const noexcept {
    return bytes_ <= limits_.hard && bytes <= limits_.hard - bytes_;
  }

  void charge(std::uint64_t bytes) noexcept {
    bytes_ += bytes;
    partition_.bytes += bytes;
    ++blocks_;
  }
  void refund(std::uint64_t bytes) noexcept {
    bytes_ -= bytes;
    partition_.bytes -= bytes;
    --blocks_;
  }
  void begin_cached(std::uint64_t bytes) noexcept { partition_.cached += bytes; }
  void end_cached(std::uint64_t bytes) noexcept { partition_.cached -= bytes; }

  Counters counters;

 private:
  friend class NamespaceAccounts;

  std::string name_;
  Limits limits_;
  Partition& partition_;
  std::uint64_t bytes_ = 0;
  std::uint64_t blocks_ = 0;
  /// Of its key, by which the next client with that name is told from a stranger.
  std::optional<ipc::Digest> proof_;
  bool is_claimed_ = false;  ///< proof_ says what its clients have; nothing: no key.
};

/// All namespaces that were named by the configuration or a client. @threading one thread.
/// @lifetime outlives whatever is charged to it.
class NamespaceAccounts {
 public:
  /// Names come from clients.
  static constexpr std::size_t kMostAccounts = 1024;

  /// Throws Exception as NamespaceQuotas::check().
  NamespaceAccounts(std::uint64_t pool_bytes, NamespaceQuotas quotas);
  NamespaceAccounts(const NamespaceAccounts&) = delete;
  NamespaceAccounts& operator=(const NamespaceAccounts&) = delete;
  ~NamespaceAccounts() = default;

  using IsUsed = std::function<bool(const NamespaceAccount&)>;
  /// The account of that name, made when there is none. kBusy: there are too many already;
  /// is_used: those that have nothing in the pool and still have to stay.
  [[nodiscard]] ipc::Result<NamespaceAccount*> open(const std::string& name, const IsUsed& is_used);
  /// Of what is of no namespace that is known.
  [[nodiscard]] NamespaceAccount& nobody() const noexcept { return *nobody_; }
  /// The one of all without a quota comes first.
  [[nodiscard]] const std::vector<std::unique_ptr<Partition>>& partitions() const noexcept {
    return partitions_;
  }
  /// Is told of partitions that are no more; their blocks are gone.
  void on_partition_gone(std::function<void(std::uint32_t)> on_gone) {
    on_gone_ = std::move(on_gone);
  }
  /// A client comes in its name with that key, or none. Who comes first says which key it is, for
  /// as long as anything is held for it or any client of it is there; to others kPermission.
  [[nodiscard]] static ipc::Status claim(NamespaceAccount& account,
                                         const std::optional<ipc::Digest>& key,
                                         const IsUsed& is_used);
  /// As an earlier manager left it: stays until end_adoption(), whatever it has. @return its
  /// account, or nobody's where there are too many
  [[nodiscard]] NamespaceAccount& adopt(const std::string& name,
                                        const std::optional<ipc::Digest>& proof);
  void end_adoption() noexcept { is_adopting_ = false; }
  [[nodiscard]] const std::map<std::string, std::unique_ptr<NamespaceAccount>>& all()
      const noexcept {
    return accounts_;
  }

 private:
  [[nodiscard]] NamespaceAccount::Limits limits_of(const NamespaceQuota& quota) const;
  [[nodiscard]] NamespaceAccount& make(const std::string& name, const NamespaceQuota& quota);
  void forget_unused(const IsUsed& is_used);

  const std::uint64_t pool_bytes_;
  const NamespaceQuotas quotas_;
  std::vector<std::unique_ptr<Partition>> partitions_;
  std::map<std::string, std::unique_ptr<NamespaceAccount>> accounts_;
  std::unique_ptr<NamespaceAccount> nobody_;
  std::uint64_t shares_ = 0;  ///< Soft shares, all together.
  std::uint32_t next_partition_ = 0;
  bool is_adopting_ = false;  ///< Blocks are still to be charged: nobody is forgotten.
  std::function<void(std::uint32_t)> on_gone_ = [](std::uint32_t) {};
};

}  // namespace kvferry::cache_manager
