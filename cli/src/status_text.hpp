// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <string>
#include <string_view>

namespace kvferry::cli {

/// The manager's status JSON as tables for people. Fields that are missing are left out; kProtocol
/// when it is not a JSON object at all.
[[nodiscard]] ipc::Result<std::string> describe_status(std::string_view json);

/// What an engine lacks for offload, by the notes and states of its processes; one line.
[[nodiscard]] std::string describe_missing(std::string_view json, std::string_view engine);

}  // namespace kvferry::cli
