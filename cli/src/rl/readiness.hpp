// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// What a manager's status (its JSON) still lacks before an engine's ranks work together with these
/// weights, in words; empty when nothing does.
[[nodiscard]] std::vector<std::string> missing_from(std::string_view status,
                                                    std::string_view engine,
                                                    std::uint32_t ranks,
                                                    const ipc::Digest& weights);

}  // namespace kvferry::cli
