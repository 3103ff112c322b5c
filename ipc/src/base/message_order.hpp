// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace kvferry::ipc {

/// Tells the thread sanitizer what it cannot see: what a thread did before it sent a message comes
/// before what a thread does after it received one that the first has led to, even through other
/// processes. libzmq is not instrumented, and one thread may send through it what comes back to
/// another on a socket of ours. One order for all messages, as the sanitizer itself keeps one for
/// all sockets of the kernel. In other builds this is nothing.
/// @threading any.
class MessageOrder {
 public:
  static void before_send() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&messages_);
#endif
  }

  static void after_receive() noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&messages_);
#endif
  }

#if defined(__SANITIZE_THREAD__)
 private:
  static inline char messages_ = 0;  ///< Its address stands for all messages.
#endif
};

}  // namespace kvferry::ipc
