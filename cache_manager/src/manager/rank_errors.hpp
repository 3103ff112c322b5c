// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"

#include <fmt/format.h>

#include <string>

namespace kvferry::cache_manager {

/// A peer that is dead or not registered holds nothing.
inline bool is_gone(ipc::ErrorCode code) {
  return code == ipc::ErrorCode::kPeerDied || code == ipc::ErrorCode::kNotFound;
}

/// Names the rank that an error is about.
inline ipc::Error in_rank(const ipc::Error& error, const std::string& engine, ipc::Rank rank) {
  ipc::Error named = error;
  named.message = fmt::format("engine {} rank {}: {}", engine, rank.value, error.message);
  return named;
}

}  // namespace kvferry::cache_manager
