// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "soak/judge.hpp"
#include "soak/soak.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>
#include <vector>

namespace kvferry::soak {

/// Holds what a run has seen to its limits.
[[nodiscard]] std::vector<Figure> judge(const SoakOptions& options, const Seen& seen);
/// Whatever was wrong, line by line.
[[nodiscard]] std::vector<std::string> complaints(const Seen& seen);
[[nodiscard]] nlohmann::json to_json(const SoakOptions& options,
                                     const Seen& seen,
                                     const std::vector<Figure>& figures);

}  // namespace kvferry::soak
