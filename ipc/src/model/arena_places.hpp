// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/arena_layout.hpp"

namespace kvferry::ipc::model {

/// The part of ArenaLayout::validate() that needs no geometry: segments, bounds, order of the
/// groups, no shared bytes, one run per block in kBlockFirst. kProtocol.
[[nodiscard]] Status check_places(const ArenaLayout& layout);

}  // namespace kvferry::ipc::model
