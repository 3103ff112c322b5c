// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvferry::ipc {

/// Tells the thread sanitizer what it cannot see: a number that a thread of ZeroMQ has closed may
/// come back as another thread's descriptor, from a call that the sanitizer does not know
/// (pidfd_open, say). The kernel orders the two. In other builds this is nothing.
/// @threading any.
class DescriptorOrder {
 public:
  /// By the thread that will close it, after its last use that the sanitizer sees.
  static void before_close() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&descriptors_);
#endif
  }

  static void after_open() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&descriptors_);
#endif
  }

#if defined(__SANITIZE_THREAD__)
 private:
  static inline char descriptors_ = 0;  ///< Its address stands for all descriptors.
#endif
};

}  // namespace kvferry::ipc
