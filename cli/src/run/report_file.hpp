// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <filesystem>
#include <string_view>

namespace kvferry::cli {

/// Whether the file can be written, before a long run. Leaves what is there as it is.
[[nodiscard]] ipc::Status check_report_file(const std::filesystem::path& file);
/// The whole text, in the place of what the file held.
[[nodiscard]] ipc::Status write_report_file(std::string_view text,
                                            const std::filesystem::path& file);

}  // namespace kvferry::cli
