// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace kvferry::ipc {

/// Mistakes that tests build into copies of sources, one at a time, to see that each is caught for
/// its own reason (tests/mutants/). In the product every one is the constant false.
#if defined(KVFERRY_MUTANTS)
/// Whether this mistake is the one to make. Defined by the test's program.
[[nodiscard]] bool is_mutant(std::string_view name) noexcept;
#else
[[nodiscard]] constexpr bool is_mutant(std::string_view /*name*/) noexcept { return false; }
#endif

}  // namespace kvferry::ipc
