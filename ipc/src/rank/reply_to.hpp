// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/messages.hpp"

namespace kvferry::ipc {

/// The reply to a request, still without body and error.
inline Envelope reply_to(const Envelope& request) {
  Envelope reply;
  reply.kind = request.kind;
  reply.request = request.request;
  reply.is_reply = true;
  return reply;
}

}  // namespace kvferry::ipc
