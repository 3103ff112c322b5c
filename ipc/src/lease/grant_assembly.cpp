// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/grant_assembly.hpp"

#include "kvferry/ipc/lease/words.hpp"

#include <utility>

namespace kvferry::ipc::lease {

Result<std::optional<Grant>> GrantAssembly::add(Incoming incoming) {
  auto result = add_part(std::move(incoming));
  if (!result || result->has_value()) pending_.reset();
  return result;
}

Result<std::optional<Grant>> GrantAssembly::add_part(Incoming incoming) {
  std::vector<UniqueFd> fds = std::exchange(incoming.packet.fds, {});
  KVFERRY_ASSIGN(GrantBody part, read_body<GrantBody>(incoming, "Grant"));
  if (part.first == 0) {
    KVFERRY_TRY(begin(part));
  }
  KVFERRY_TRY(check_part(part));
  std::size_t next_fd = 0;
  for (WireHandle& wire : part.handles) {
    KVFERRY_TRY(check_handle(wire, pending_->handles.size()));
    ExportedHandle handle;
    handle.kind = wire.kind;
    handle.size_bytes = wire.size_bytes;
    handle.token = std::move(wire.token);
    if (wire.has_fd) {
      if (next_fd == fds.size()) {
        return KVFERRY_ERROR(kProtocol, "grant of lease {}: more handles than its {} descriptors",
                             part.lease.value, fds.size());
      }
      handle.fd = std::move(fds[next_fd++]);
    }
    pending_->handles.push_back(std::move(handle));
  }
  if (next_fd != fds.size()) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {}: {} descriptors for {} handles",
                         part.lease.value, fds.size(), next_fd);
  }
  if (pending_->handles.size() < pending_->layout.segment_bytes.size()) {
    return std::optional<Grant>();
  }
  return std::optional<Grant>(std::move(*pending_));
}

Status GrantAssembly::begin(const GrantBody& part) {
  if (pending_) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {} begins inside that of lease {}",
                         part.lease.value, pending_->lease.value);
  }
  if (!part.layout) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {} begins without a layout", part.lease.value);
  }
  if (part.lease.value == 0 || part.epoch.value == 0 || part.epoch.value > words::kMaxEpoch) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {} on epoch {}", part.lease.value,
                         part.epoch.value);
  }
  if (part.prepared && *part.prepared >= part.lease) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {} says that lease {} prepared the epoch",
                         part.lease.value, part.prepared->value);
  }
  KVFERRY_TRY(part.layout->validate(geometry_));
  if (part.total != part.layout->segment_bytes.size() || part.total == 0 ||
      part.total > kMaxHandles) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {}: {} handles for {} segments",
                         part.lease.value, part.total, part.layout->segment_bytes.size());
  }
  pending_.emplace();
  pending_->epoch = part.epoch;
  pending_->lease = part.lease;
  pending_->prepared = part.prepared;
  pending_->layout = *part.layout;
  return ok();
}

Status GrantAssembly::check_part(const GrantBody& part) const {
  if (!pending_ || part.lease != pending_->lease || part.epoch != pending_->epoch ||
      part.prepared != pending_->prepared || part.first != pending_->handles.size()) {
    return KVFERRY_ERROR(kProtocol, "part from handle {} of lease {} does not follow", part.first,
                         part.lease.value);
  }
  const std::size_t total = pending_->layout.segment_bytes.size();
  if (part.handles.empty() || part.total != total ||
      part.handles.size() > total - pending_->handles.size()) {
    return KVFERRY_ERROR(kProtocol, "grant of lease {}: {} handles at {} of {}", part.lease.value,
                         part.handles.size(), part.first, total);
  }
  return ok();
}

Status GrantAssembly::check_handle(const WireHandle& handle, std::size_t index) const {
  const std::uint64_t needed = pending_->layout.segment_bytes[index];
  if (handle.kind != handles_ || handle.size_bytes < needed ||
      handle.token.size() > kMaxTokenBytes || (!handle.has_fd && handle.token.empty())) {
    return KVFERRY_ERROR(kProtocol,
                         "handle {} of lease {}: {} of {} bytes with a token of {} bytes; expected "
                         "{} of at least {}",
                         index, pending_->lease.value, to_string(handle.kind), handle.size_bytes,
                         handle.token.size(), to_string(handles_), needed);
  }
  return ok();
}

}  // namespace kvferry::ipc::lease
