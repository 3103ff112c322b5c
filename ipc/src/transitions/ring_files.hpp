// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"

#include <cstddef>
#include <filesystem>
#include <string>

namespace kvferry::ipc::transitions {

/// DIR/INSTANCE/transitions, made with mode 0700 when it is not there.
[[nodiscard]] Result<std::filesystem::path> make_ring_folder(const RuntimeDir& dir);
/// "mover.chat.0.4711.89ab": role, engine, rank, pid and a few digits of the incarnation.
[[nodiscard]] std::string ring_name(const TransitionWriter& writer);
/// Tells others that the writer lives; the kernel lets go of it when the process ends.
[[nodiscard]] Status lock_ring(int ring_fd);
/// Whether the process that writes the ring lives.
[[nodiscard]] bool is_written(int ring_fd) noexcept;
/// Removes the rings of ended processes, except for the newest ones.
void remove_ended_rings(const std::filesystem::path& folder, std::size_t keep);

}  // namespace kvferry::ipc::transitions
