// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "manager/engine_directory.hpp"

#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// A process that owns a rank's cache memory, seen by the name that it holds, of an engine that
/// this manager does not know: it has not registered, such as shortly after the manager's start.
struct UnknownOwner {
  std::string engine;
  ipc::Rank rank;
  pid_t pid = 0;  ///< 0: not known.
};

/// What a clear is for.
struct ClearScope {
  std::vector<EngineRecord*> engines;
  std::vector<UnknownOwner> unknown_owners;
  std::optional<ipc::Error> blind;  ///< Why unknown owners could not be looked for.
  /// Engines of which nobody is left but prefixes in host memory.
  std::vector<std::string> departed;
};

/// The engines that a peer means by a name: that one; with an empty name its own engine for an
/// engine's client, else all. Errors: kNotFound when neither a process nor a block in host memory
/// belongs to an engine of that name.
[[nodiscard]] ipc::Result<ClearScope> find_scope(EngineDirectory& directory,
                                                 const ipc::RuntimeDir& dir,
                                                 const ipc::Peer& peer,
                                                 const std::string& name);

}  // namespace kvferry::cache_manager
