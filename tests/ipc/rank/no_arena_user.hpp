// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/arena.hpp"

namespace kvferry::ipc {

/// Of tests in which nothing is mapped.
class NoArenaUser final : public ArenaUser {
 public:
  Status on_mapped(SessionId /*session*/, Arena& /*arena*/, ArenaContents /*contents*/) override {
    return ok();
  }
  Status quiesce(Epoch /*epoch*/, Deadline /*deadline*/) override { return ok(); }
  void on_unmapped(Epoch /*epoch*/) override {}
};

}  // namespace kvferry::ipc
