// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/hello.hpp"

#include <fmt/format.h>

namespace kvferry::ipc::lease {
namespace {

std::uint64_t compared(const LeaseIdentity& identity, ProcessKind listener) {
  const std::string all = fmt::format(
      "{} {}/{}/{} of {} {} {} {} {}", kLeaseProtocolVersion, identity.instance, identity.engine,
      identity.rank.value, identity.ranks, to_string(listener), to_string(identity.cache_owner),
      to_string(identity.handles), identity.fingerprint.hex());
  return (Digest::hash(all.data(), all.size()).low() & ~kComparedRole) |
         static_cast<std::uint64_t>(identity.cache_owner);
}

}  // namespace

std::uint64_t compared_as_listener(const LeaseIdentity& identity) {
  return compared(identity, identity.self);
}

std::uint64_t compared_as_greeter(const LeaseIdentity& identity) {
  return compared(
      identity, identity.self == ProcessKind::kWorker ? ProcessKind::kMover : ProcessKind::kWorker);
}

Status compare_roles(const LeaseIdentity& a, pid_t a_pid, const LeaseIdentity& b, pid_t b_pid) {
  if (a.cache_owner != b.cache_owner) {
    return KVFERRY_ERROR(kRoleConflict,
                         "{}/{}: {} pid {} was started with --cache-owner {}, {} pid {} with {}; "
                         "start both with the same",
                         a.engine, a.rank.value, to_string(a.self), a_pid, to_string(a.cache_owner),
                         to_string(b.self), b_pid, to_string(b.cache_owner));
  }
  return ok();
}

Status compare_identities(const LeaseIdentity& owner,
                          pid_t owner_pid,
                          const LeaseIdentity& attacher,
                          pid_t attacher_pid) {
  if (owner.instance != attacher.instance || owner.engine != attacher.engine ||
      owner.rank != attacher.rank) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "owner pid {} serves {}/{}/{}, attacher pid {} is {}/{}/{}; start it with "
                         "the same instance, engine and rank",
                         owner_pid, owner.instance, owner.engine, owner.rank.value, attacher_pid,
                         attacher.instance, attacher.engine, attacher.rank.value);
  }
  KVFERRY_TRY(compare_roles(owner, owner_pid, attacher, attacher_pid));
  if (owner.self == attacher.self) {
    return KVFERRY_ERROR(
        kRoleConflict, "{}/{}: {} pid {} owns the cache already; {} pid {} would be a second owner",
        owner.engine, owner.rank.value, to_string(owner.self), owner_pid, to_string(attacher.self),
        attacher_pid);
  }
  if (owner.ranks != attacher.ranks) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "{}/{}: owner pid {} counts {} ranks, attacher pid {} counts {}; start "
                         "both with the same",
                         owner.engine, owner.rank.value, owner_pid, owner.ranks, attacher_pid,
                         attacher.ranks);
  }
  if (owner.fingerprint != attacher.fingerprint) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "{}/{}: owner pid {} has geometry {}, attacher pid {} has {}; start both "
                         "with one geometry and arena order",
                         owner.engine, owner.rank.value, owner_pid, owner.fingerprint.hex(),
                         attacher_pid, attacher.fingerprint.hex());
  }
  if (owner.handles != attacher.handles) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}/{}: owner pid {} shares {} handles, attacher pid {} expects {}; start "
                         "both with the same --handles",
                         owner.engine, owner.rank.value, owner_pid, to_string(owner.handles),
                         attacher_pid, to_string(attacher.handles));
  }
  return ok();
}

bool is_permanent(const Error& error) noexcept {
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kPermission:
    case ErrorCode::kVersionMismatch:
    case ErrorCode::kGeometryMismatch:
    case ErrorCode::kRoleConflict: return true;
    default: return false;  // the rest passes with time or with another owner
  }
}

Error version_mismatch(std::uint32_t ours, std::uint32_t theirs, pid_t peer) {
  return KVFERRY_ERROR(kVersionMismatch,
                       "lease protocol {} here, {} at pid {}; update the older side", ours, theirs,
                       peer);
}

}  // namespace kvferry::ipc::lease
