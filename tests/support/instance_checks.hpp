// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/runtime_dir.hpp"

#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::test {

/// What the rules do not allow in the instance's recorded transitions, each with the story that led
/// there; an error to read them counts as one. Appends the moves of the relation that they have to
/// the file KVFERRY_MOVES_REPORT, if that is set.
[[nodiscard]] std::vector<std::string> find_breaches(const ipc::RuntimeDir& instance);

/// Names of all files below the folder but recorded transitions.
[[nodiscard]] std::vector<std::string> names_below(const std::filesystem::path& folder);

}  // namespace kvferry::test
