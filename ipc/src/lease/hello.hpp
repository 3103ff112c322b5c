// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/lease/lease.hpp"

#include <sys/types.h>

#include <cstdint>

namespace kvferry::ipc::lease {

/// What every hello compares, before anything is allocated or awaited: roles first, then all that
/// decides how bytes are read. The error names both values and the remedy and is told to both
/// sides.
[[nodiscard]] Status compare_identities(const LeaseIdentity& owner,
                                        pid_t owner_pid,
                                        const LeaseIdentity& attacher,
                                        pid_t attacher_pid);

/// Two processes that say the same of themselves must agree on who owns: kRoleConflict otherwise.
[[nodiscard]] Status compare_roles(const LeaseIdentity& a,
                                   pid_t a_pid,
                                   const LeaseIdentity& b,
                                   pid_t b_pid);

/// What compare_identities() looks at as a number, for the records of transitions: of a process
/// that listens, and of one that says hello to it. Different, if one of its parts is. Who owns is
/// in it as it is (kComparedRole).
[[nodiscard]] std::uint64_t compared_as_listener(const LeaseIdentity& identity);
[[nodiscard]] std::uint64_t compared_as_greeter(const LeaseIdentity& identity);

/// Errors of a hello that retrying cannot mend.
[[nodiscard]] bool is_permanent(const Error& error) noexcept;

[[nodiscard]] Error version_mismatch(std::uint32_t ours, std::uint32_t theirs, pid_t peer);

}  // namespace kvferry::ipc::lease
