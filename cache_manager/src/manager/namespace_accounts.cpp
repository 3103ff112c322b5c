// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/namespace_accounts.hpp"

#include "kvferry/ipc/base/keyed_hash.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "manager/names.hpp"

#include <algorithm>
#include <string_view>

namespace kvferry::cache_manager {
namespace {

/// What is kept of a key instead of it.
std::optional<ipc::Digest> proof_of(const std::optional<ipc::Digest>& key) {
  constexpr std::string_view kPurpose = "kvferry namespace proof 1";
  if (!key) return std::nullopt;
  return ipc::keyed_hash(*key, kPurpose.data(), kPurpose.size());
}

}  // namespace

NamespaceAccounts::NamespaceAccounts(std::uint64_t pool_bytes, NamespaceQuotas quotas)
    : pool_bytes_(pool_bytes), quotas_(std::move(quotas)) {
  if (ipc::Status good = quotas_.check(pool_bytes_); !good) throw ipc::Exception(good.error());
  partitions_.push_back(std::make_unique<Partition>(Partition{next_partition_++, 0, pool_bytes_}));
  nobody_ = std::make_unique<NamespaceAccount>("", NamespaceAccount::Limits{}, *partitions_[0]);
  for (const auto& [name, quota] : quotas_.named) (void)make(name, quota);
}

// A soft share that does not fit beside the others could not be held to.
NamespaceAccount::Limits NamespaceAccounts::limits_of(const NamespaceQuota& quota) const {
  return {std::min(quota.soft.of(pool_bytes_), pool_bytes_ - shares_), quota.hard.of(pool_bytes_)};
}

NamespaceAccount& NamespaceAccounts::make(const std::string& name, const NamespaceQuota& quota) {
  const NamespaceAccount::Limits limits = limits_of(quota);
  if (limits.soft < quota.soft.of(pool_bytes_)) {
    ipc::log_warn("namespace {}: its soft share is {} instead of {}: others have the rest", name,
                  ipc::format_size(limits.soft), quota.soft.to_string());
  }
  shares_ += limits.soft;
  partitions_.push_back(std::make_unique<Partition>(
      Partition{next_partition_++, limits.soft, limits.soft > 0 ? limits.soft : limits.hard}));
  return *accounts_
              .emplace(name, std::make_unique<NamespaceAccount>(name, limits, *partitions_.back()))
              .first->second;
}

ipc::Result<NamespaceAccount*> NamespaceAccounts::open(const std::string& name,
                                                       const IsUsed& is_used) {
  if (const auto known = accounts_.find(name); known != accounts_.end()) {
    return known->second.get();
  }
  KVFERRY_TRY(check_namespace(name));
  // Shares of those that are gone are free for others.
  const bool is_short =
      quotas_.others && limits_of(*quotas_.others).soft < quotas_.others->soft.of(pool_bytes_);
  if (is_short || accounts_.size() >= kMostAccounts) forget_unused(is_used);
  if (accounts_.size() >= kMostAccounts) {
    return KVFERRY_ERROR(kBusy,
                         "namespace {}: {} others have blocks or clients: end some of them, or "
                         "use one of theirs",
                         name, accounts_.size());
  }
  if (quotas_.others) return &make(name, *quotas_.others);
  auto made = std::make_unique<NamespaceAccount>(name, NamespaceAccount::Limits{}, *partitions_[0]);
  return accounts_.emplace(name, std::move(made)).first->second.get();
}

void NamespaceAccounts::forget_unused(const IsUsed& is_used) {
  if (is_adopting_) return;
  std::erase_if(accounts_, [&](const auto& item) {
    const NamespaceAccount& account = *item.second;
    if (account.blocks() > 0 || quotas_.named.contains(item.first) || is_used(account)) {
      return false;
    }
    shares_ -= account.limits().soft;
    if (const std::uint32_t id = account.partition().id; id != partitions_[0]->id) {
      on_gone_(id);
      std::erase_if(partitions_, [id](const auto& one) { return one->id == id; });
    }
    return true;
  });
}

NamespaceAccount& NamespaceAccounts::adopt(const std::string& name,
                                           const std::optional<ipc::Digest>& proof) {
  // Clients that come meanwhile have their own, which stay.
  const auto account = open(name, [](const NamespaceAccount&) { return true; });
  if (!account) {
    ipc::log_warn("blocks of an earlier manager are charged to nobody: {}",
                  account.error().message);
    return nobody();
  }
  is_adopting_ = true;
  (*account)->is_claimed_ = true;
  (*account)->proof_ = proof;
  return **account;
}

ipc::Status NamespaceAccounts::claim(NamespaceAccount& account,
                                     const std::optional<ipc::Digest>& key,
                                     const IsUsed& is_used) {
  const std::optional<ipc::Digest> proof = proof_of(key);
  if (account.is_claimed_ && account.proof_ != proof &&
      (account.blocks() > 0 || is_used(account))) {
    return KVFERRY_ERROR(kPermission,
                         "namespace {} is used with {} key: give the one that its other clients "
                         "have, or use a namespace of another name",
                         account.name(),
                         !account.proof_ ? "no"
                         : key           ? "another"
                                         : "a");
  }
  account.is_claimed_ = true;
  account.proof_ = proof;
  return ipc::ok();
}

}  // namespace kvferry::cache_manager
