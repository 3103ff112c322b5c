// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_log.hpp"

#include <string_view>

namespace kvferry::ipc::transitions {

/// The sentence of transitions.inc, with its placeholders.
[[nodiscard]] std::string_view words_of(Transition transition) noexcept;

}  // namespace kvferry::ipc::transitions
