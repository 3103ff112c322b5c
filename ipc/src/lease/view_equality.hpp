// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"

namespace kvferry::ipc::lease {

[[nodiscard]] bool same_view(const LeaseView& a, const LeaseView& b);

}  // namespace kvferry::ipc::lease
