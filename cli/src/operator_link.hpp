// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/control.hpp"

#include <memory>
#include <string>

namespace kvferry::cli {

/// A link to the running manager of an instance, as its operator. kNoManager when there is none.
[[nodiscard]] ipc::Result<std::unique_ptr<ipc::ControlLink>> connect_operator(
    const std::string& runtime_dir, const std::string& instance, ipc::Deadline deadline);

}  // namespace kvferry::cli
