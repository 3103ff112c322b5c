// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/weights_user.hpp"

namespace kvferry::ipc {
namespace {

constexpr std::size_t kLongestPath = 4096;
/// With {rank}: a lender's name has fewer characters than that.
constexpr std::size_t kLongestLender = 80;
constexpr std::string_view kRankMark = "{rank}";

}  // namespace

std::string_view to_string(WeightsFrom from) noexcept {
  switch (from) {
    case WeightsFrom::kDisk: return "disk";
    case WeightsFrom::kTensors: return "tensor";
    case WeightsFrom::kIpc: return "ipc";
    case WeightsFrom::kDistributed: return "distributed";
  }
  return "invalid";
}

std::string lender_of(std::string_view location, std::uint32_t rank) {
  std::string name(location);
  if (const auto mark = name.find(kRankMark); mark != std::string::npos) {
    name.replace(mark, kRankMark.size(), std::to_string(rank));
  }
  return name;
}

Status check_source(const WeightsSource& source) {
  const bool lent = source.from == WeightsFrom::kIpc;
  if (lent && source.location.empty()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "weights from ipc: give the name of the process that lends them");
  }
  const std::size_t longest = lent ? kLongestLender : kLongestPath;
  if (source.location.size() <= longest) return ok();
  return KVFERRY_ERROR(kInvalidArgument, "weights from {}: a {} of {} bytes: at most {} are taken",
                       to_string(source.from), lent ? "name" : "path", source.location.size(),
                       longest);
}

Result<BroadcastPort> WeightsUser::broadcast_port() {
  return KVFERRY_ERROR(kNotFound, "its engine takes no broadcasts");
}

Result<BroadcastId> WeightsUser::open_broadcast(const std::string& file, bool /*again*/) {
  return KVFERRY_ERROR(kNotFound, "weights file {}: its engine has no broadcasts", file);
}

Result<std::uint64_t> WeightsUser::prepare_broadcast(const BroadcastId& id, Deadline /*deadline*/) {
  return KVFERRY_ERROR(kNotFound, "a broadcast with an id of {} bytes: its engine takes none",
                       id.size());
}

}  // namespace kvferry::ipc
