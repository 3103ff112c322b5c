// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

/// The other side of ChildProcess, for helper binaries: lines in on stdin, lines out on stdout.
namespace kvferry::test {

/// Writes one line to stdout at once. Ends the process when nobody reads.
void say(std::string_view line);

/// The next line of stdin, without its end; nothing at end of file: the test has ended.
/// @threading one at a time.
[[nodiscard]] std::optional<std::string> hear();

/// For helpers that die by a signal on purpose.
void disable_core_dumps() noexcept;

}  // namespace kvferry::test
