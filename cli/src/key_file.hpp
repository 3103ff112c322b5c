// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <filesystem>

namespace kvferry::cli {

/// The key of a namespace out of a file that has nothing else: 32 hexadecimal digits, and white
/// space around them. kPermission when it is not this user's, or others may read or write it;
/// kInvalidArgument when it is no plain file or has no key. No error has any of what it holds.
[[nodiscard]] ipc::Result<ipc::Digest> read_key_file(const std::filesystem::path& file);

}  // namespace kvferry::cli
