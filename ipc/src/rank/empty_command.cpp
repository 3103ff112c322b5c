// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/empty_command.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "rank/reply_to.hpp"

#include <utility>

namespace kvferry::ipc {

LifecycleCommands::Answer EmptyCommand::run(const Envelope& request) {
  LifecycleCommands::Answer done;
  done.reply = reply_to(request);
  const auto command = decode<RankEmpty>(request.body, "RankEmpty");
  const Result<EmptiedCache> emptied =
      command ? user_.empty(command->reason) : Result<EmptiedCache>(command.error());
  if (!emptied) {
    log_warn("{}", emptied.error().to_string());
    done.reply.error = emptied.error();
    return done;
  }
  AllocatorMemory reply;
  reply.reserved_before = emptied->reserved_before;
  reply.reserved_after = emptied->reserved_after;
  reply.used_after = emptied->used_after;
  if (const auto memory = device_.memory_info(); memory) {
    done.memory = *memory;
    reply.free_on_device = memory->free_bytes;
  }
  done.reply.body = encode(reply);
  return done;
}

}  // namespace kvferry::ipc
