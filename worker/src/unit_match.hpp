// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"

#include <cstdint>
#include <span>

namespace kvferry::worker {

/// How many blocks of the prefix can be loaded, by the rules of all groups: the longest prefix of
/// it whose units are there, the last one partial or not.
/// @param rules in units
[[nodiscard]] std::uint32_t usable_in_units(const ipc::PrefixTableView& table,
                                            const ipc::Digest& root,
                                            std::span<const ipc::Digest> hashes,
                                            std::span<const ipc::GroupRule> rules,
                                            std::uint32_t unit_blocks);

}  // namespace kvferry::worker
