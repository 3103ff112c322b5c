// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvferry::cli {

/// Ends this process when the other end of the pipe is closed, as the kernel does when the parent
/// dies in whatever way: SIGTERM to ourselves, SIGKILL after a grace time.
/// @threading once, before other threads start.
void end_with_parent(int pipe_fd);

}  // namespace kvferry::cli
