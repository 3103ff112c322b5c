// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/view_equality.hpp"

namespace kvferry::ipc::lease {
namespace {

bool same_error(const std::optional<Error>& a, const std::optional<Error>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->code == b->code && a->message == b->message;
}

}  // namespace

bool same_view(const LeaseView& a, const LeaseView& b) {
  return a.session == b.session && a.epoch == b.epoch && a.phase == b.phase &&
         a.mapped == b.mapped && a.prepared_by == b.prepared_by &&
         a.group_blocks == b.group_blocks && a.lease_holders == b.lease_holders &&
         a.quarantined_bytes == b.quarantined_bytes && a.note == b.note &&
         same_error(a.refused, b.refused) && same_error(a.peer_refused, b.peer_refused);
}

}  // namespace kvferry::ipc::lease
