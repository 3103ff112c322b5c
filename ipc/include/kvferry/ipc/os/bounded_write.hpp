// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <string_view>

namespace kvferry::ipc {

/// Writes all of the text, and waits for a reader that does not read (a pipe, a terminal, a socket
/// of the system's log) no longer than its patience lasts. 0, or an errno: EAGAIN when the reader
/// took nothing for that long; the rest of the text was not written then.
/// @threading any; where the kernel cannot write to a pipe without waiting (before 6.4) and another
/// process fills the same pipe at the same moment, one write may wait for the reader.
[[nodiscard]] int write_bounded(int fd, std::string_view text, Duration patience) noexcept;

}  // namespace kvferry::ipc
