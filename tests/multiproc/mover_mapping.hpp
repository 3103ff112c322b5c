// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/arena.hpp"

#include <mutex>

namespace kvferry::test {

/// A mover's side of the arena: the lease thread maps, the test looks.
class MoverMapping final : public ipc::ArenaUser {
 public:
  ipc::Status on_mapped(ipc::SessionId session,
                        ipc::Arena& arena,
                        ipc::ArenaContents /*contents*/) override {
    const std::lock_guard lock(mutex_);
    session_ = session;
    arena_ = &arena;
    return ipc::ok();
  }
  ipc::Status quiesce(ipc::Epoch /*epoch*/, ipc::Deadline /*deadline*/) override {
    return ipc::ok();
  }
  void on_unmapped(ipc::Epoch /*epoch*/) override {
    const std::lock_guard lock(mutex_);
    arena_ = nullptr;
  }
  [[nodiscard]] ipc::Arena* arena() const {
    const std::lock_guard lock(mutex_);
    return arena_;
  }
  [[nodiscard]] ipc::SessionId session() const {
    const std::lock_guard lock(mutex_);
    return session_;
  }

 private:
  mutable std::mutex mutex_;
  ipc::SessionId session_;
  ipc::Arena* arena_ = nullptr;
};

}  // namespace kvferry::test
