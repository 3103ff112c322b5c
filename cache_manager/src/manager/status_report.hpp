// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/context.hpp"

#include <cstddef>
#include <string>

namespace kvferry::cache_manager {

/// The manager's picture as JSON (fields: docs/operations.md). A pure observation: changes nothing,
/// not even what is recently used.
[[nodiscard]] std::string status_json(const ManagerContext& context,
                                      std::size_t unread_completions,
                                      std::size_t sums_awaited,
                                      ipc::TimePoint started,
                                      std::size_t proofs_open);

}  // namespace kvferry::cache_manager
