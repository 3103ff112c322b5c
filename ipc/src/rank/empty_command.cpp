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
  if (!command) log_warn("{}", command.error().to_string());
  const Result<EmptiedCache> emptied =
      command ? user_.empty(command->reason) : Result<EmptiedCache>(command.error());
  AllocatorMemory reply;
  // Also after a failure, which may have given some of it back.
  if (const auto memory = device_.memory_info(); memory) {
    done.memory = *memory;
    reply.free_on_device = memory->free_bytes;
  }
  if (!emptied) {
    done.reply.error = emptied.error();
    return done;
  }
  reply.reserved_before = emptied->reserved_before;
  reply.reserved_after = emptied->reserved_after;
  reply.used_after = emptied->used_after;
  done.reply.body = encode(reply);
  return done;
}

}  // namespace kvferry::ipc
