// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <utility>

namespace kvferry::ipc {

/// Keeps a value until the process has ended: it is never destroyed, and stays reachable, so that
/// leak checkers tell it from one that was lost. For memory that somebody may still use, where the
/// driver's clean-up after our death is the only safe free.
/// @threading any thread.
template <typename T> void keep_until_process_end(T value) {
  struct Kept {
    T value;
    Kept* next;
  };
  static std::atomic<Kept*> newest{nullptr};
  Kept* kept = std::make_unique<Kept>(Kept{std::move(value), newest.load()}).release();
  while (!newest.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace kvferry::ipc
