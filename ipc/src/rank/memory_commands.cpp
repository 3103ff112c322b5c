// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/memory_commands.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "rank/reply_to.hpp"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <optional>
#include <utility>

namespace kvferry::ipc {
namespace {

/// The cache is not among them: its memory goes with a clear.
constexpr std::array kHere{MemoryTag::kWeights, MemoryTag::kScratch};

std::uint64_t& bytes_of(RankReleaseReply& reply, MemoryTag tag) {
  return tag == MemoryTag::kWeights ? reply.weights_bytes : reply.scratch_bytes;
}

/// It is an engine's code.
template <typename Call> Result<std::uint64_t> guarded(Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return KVFERRY_ERROR(kSystem, "it threw: {}", error.what());
  }
}

Error in_tag(const Error& error, MemoryTag tag, const char* what) {
  Error named = error;
  named.message = fmt::format("{} of memory {}: {}", what, to_string(tag), error.message);
  return named;
}

}  // namespace

MemoryTags MemoryCommands::released() const {
  const std::lock_guard lock(mutex_);
  return released_;
}

void MemoryCommands::set_released(MemoryTags tags) {
  const std::lock_guard lock(mutex_);
  released_ = tags;
}

LifecycleCommands::Answer MemoryCommands::run(const Envelope& request) {
  LifecycleCommands::Answer done;
  done.reply = reply_to(request);
  auto outcome = request.kind == MessageKind::kRankRelease ? release(request) : resume(request);
  const auto seen = device_.memory_info();
  if (seen) done.memory = *seen;
  if (!outcome) {
    log_warn("{}", outcome.error().to_string());
    done.reply.error = std::move(outcome).error();
    return done;
  }
  outcome->released = released();
  if (seen) outcome->memory.free_on_device = seen->free_bytes;
  done.reply.body = encode(*outcome);
  return done;
}

Status MemoryCommands::check(MemoryTags tags) const {
  KVFERRY_TRY(tags.check());
  if (user_ != nullptr) return ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "this engine's worker tells nobody how to release {} (WorkerHooks::memory): "
                       "release its {} alone",
                       to_string(tags), to_string(MemoryTag::kKvCache));
}

// Nobody brings back what was lost before; the memory is of use to others all the same.
WeightsBackup MemoryCommands::backup_of(MemoryTag tag, WeightsBackup wanted) const {
  if (tag != MemoryTag::kWeights || wanted == WeightsBackup::kNone || !weights_.lost()) {
    return wanted;
  }
  log_info("release: no backup of weights that were lost before: they have to be updated");
  return WeightsBackup::kNone;
}

Result<RankReleaseReply> MemoryCommands::release(const Envelope& request) {
  KVFERRY_ASSIGN(const auto order, decode<RankRelease>(request.body, "RankRelease"));
  KVFERRY_TRY(check(order.tags));
  const Deadline deadline = Deadline::after(order.deadline);
  RankReleaseReply reply;
  if (const auto seen = device_.memory_info(); seen) reply.free_before = seen->free_bytes;
  std::optional<Error> failed;
  for (const MemoryTag tag : kHere) {
    if (!order.tags.has(tag) || released().has(tag) || failed) continue;
    const WeightsBackup backup = backup_of(tag, order.backup);
    auto bytes = guarded([&] { return user_->release(tag, backup, deadline); });
    if (!bytes) {
      failed = in_tag(bytes.error(), tag, "release");
      continue;
    }
    bytes_of(reply, tag) = *bytes;
    if (tag == MemoryTag::kWeights && backup == WeightsBackup::kNone && *bytes > 0) {
      weights_.lose();
    }
    set_released(released() | MemoryTags{tag});
    log_info("release: {} of {} given up", format_size(*bytes), to_string(tag));
  }
  // Also when it failed: what is given up already is of use to nobody in a cache. Where the arena
  // goes as well, its clear does it.
  if (order.empty) {
    const auto emptied = allocator_.empty(EmptyReason::kRelease);
    if (!emptied && !failed) failed = emptied.error();
    if (emptied) {
      reply.memory.reserved_before = emptied->reserved_before;
      reply.memory.reserved_after = emptied->reserved_after;
      reply.memory.used_after = emptied->used_after;
    }
  }
  if (failed) return *std::move(failed);
  return reply;
}

Result<RankReleaseReply> MemoryCommands::resume(const Envelope& request) {
  KVFERRY_ASSIGN(const auto order, decode<RankResume>(request.body, "RankResume"));
  KVFERRY_TRY(check(order.tags));
  const Deadline deadline = Deadline::after(order.deadline);
  RankReleaseReply reply;
  if (const auto seen = device_.memory_info(); seen) reply.free_before = seen->free_bytes;
  for (const MemoryTag tag : kHere) {
    if (!order.tags.has(tag) || !released().has(tag)) continue;
    const auto bytes = guarded([&] { return user_->resume(tag, deadline); });
    if (!bytes) return in_tag(bytes.error(), tag, "resume");
    bytes_of(reply, tag) = *bytes;
    set_released(released() - MemoryTags{tag});
    log_info("resume: {} of {} are back", format_size(*bytes), to_string(tag));
  }
  return reply;
}

}  // namespace kvferry::ipc
