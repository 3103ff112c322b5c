// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "index/table_format.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::ipc {

using prefix_table::Hash;
using prefix_table::Header;
using prefix_table::Slot;

namespace {

/// How often it looks for what it does not find while entries move. A writer that died in the
/// middle of it is not waited for.
constexpr int kTries = 64;

}  // namespace

Result<PrefixTableView> PrefixTableView::map(const UniqueFd& fd, std::uint64_t size_bytes) {
  if (size_bytes < prefix_table::size_for(prefix_table::kLeastLog2)) {
    return KVFERRY_ERROR(kProtocol, "a prefix table of {} is too small", format_size(size_bytes));
  }
  KVFERRY_ASSIGN(SharedMapping mapping, SharedMemory::map_single_writer(fd, size_bytes));
  PrefixTableView view(std::move(mapping));
  const Header& header = view.header();
  if (header.magic.load(std::memory_order_acquire) != prefix_table::kMagic) {
    return KVFERRY_ERROR(kProtocol, "shared memory {} is no prefix table", fd.get());
  }
  const std::uint32_t version = header.version.load(std::memory_order_relaxed);
  if (version != prefix_table::kVersion) {
    return KVFERRY_ERROR(kVersionMismatch, "the prefix table has version {}, {} is known", version,
                         prefix_table::kVersion);
  }
  const std::uint32_t most_log2 = header.most_log2.load(std::memory_order_relaxed);
  if (most_log2 < prefix_table::kLeastLog2 || most_log2 >= 48 ||
      prefix_table::size_for(most_log2) != size_bytes) {
    return KVFERRY_ERROR(kProtocol, "a prefix table of 2^{} slots does not have {} bytes",
                         most_log2, size_bytes);
  }
  return view;
}

const Header& PrefixTableView::header() const noexcept {
  return *reinterpret_cast<const Header*>(mapping_.data());
}

std::optional<TableEntry> PrefixTableView::find(const BlockKey& key) const noexcept {
  const Hash hash = prefix_table::hash_of(key, header().seed.load(std::memory_order_relaxed));
  const std::uint32_t most_log2 = header().most_log2.load(std::memory_order_relaxed);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t moves = header().moves.load(std::memory_order_acquire);
    const std::uint32_t log2 =
        std::clamp(header().slots_log2.load(std::memory_order_acquire), prefix_table::kLeastLog2,
                   std::max(most_log2, prefix_table::kLeastLog2));
    const Slot* slots =
        reinterpret_cast<const Slot*>(mapping_.data() + prefix_table::offset_of(log2));
    const std::uint64_t mask = (std::uint64_t{1} << log2) - 1;
    std::uint64_t at = hash.tag & mask;
    for (std::uint64_t looks = 0; looks <= mask; ++looks) {
      const std::uint64_t rest = slots[at].rest.load(std::memory_order_acquire);
      if (rest == 0) break;
      if (prefix_table::tag_of(rest) != hash.tag ||
          slots[at].low.load(std::memory_order_acquire) != hash.low) {
        at = (at + 1) & mask;
      } else if (slots[at].rest.load(std::memory_order_relaxed) == rest) {
        return prefix_table::entry_of(rest);  // of which both halves were read
      }
    }
    // Behind the looks, which all acquire what they meet.
    if (moves % 2 == 0 && header().moves.load(std::memory_order_acquire) == moves) break;
  }
  return std::nullopt;
}

std::uint32_t PrefixTableView::run_of(const BlockKey& key) const noexcept {
  const std::optional<TableEntry> entry = find(key);
  return entry && !entry->pending ? entry->run : 0;
}

PrefixMatch PrefixTableView::match(const Digest& root,
                                   std::span<const Digest> blocks,
                                   std::span<const GroupRule> rules) const noexcept {
  PrefixMatch match;
  if (rules.empty()) return match;
  const auto has = [&](std::size_t group, std::uint32_t n) {
    const auto id = GroupId{static_cast<std::uint32_t>(group)};
    return run_of({root, blocks[n - 1], id}) >= blocks_needed(rules[group], n);
  };
  auto most = static_cast<std::uint32_t>(blocks.size());
  // Where all of the first n are there, all of the first n - 1 are.
  for (std::size_t group = 0; group < rules.size(); ++group) {
    if (rules[group].rule != HitRule::kFull || (most > 0 && has(group, most))) continue;
    std::uint32_t there = 0;
    while (most > there + 1) {
      const std::uint32_t middle = there + (most - there) / 2;
      (has(group, middle) ? there : most) = middle;
    }
    most = there;
  }
  const auto others_have = [&](std::uint32_t n) {
    for (std::size_t group = 0; group < rules.size(); ++group) {
      if (rules[group].rule != HitRule::kFull && !has(group, n)) return false;
    }
    return true;
  };
  while (most > 0 && !others_have(most)) --most;
  match.usable = most;
  if (most == blocks.size()) return match;
  for (std::size_t group = 0; group < rules.size(); ++group) {
    const auto entry = find({root, blocks[most], GroupId{static_cast<std::uint32_t>(group)}});
    if (!entry) {
      match.pending = false;
      break;
    }
    match.pending = match.pending || entry->pending;
  }
  return match;
}

}  // namespace kvferry::ipc
