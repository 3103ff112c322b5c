// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "client_checks.hpp"
#include "client_impl.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/client.hpp"

/// What keeps blocks in host memory.
namespace kvferry::worker {

using ipc::MessageKind;

namespace {

Result<std::uint32_t> count_pins(ClientLink& link,
                                 MessageKind kind,
                                 std::span<const Digest> hashes,
                                 Deadline deadline) {
  if (hashes.empty()) return 0U;
  KVFERRY_TRY(check_count(hashes.size(), "hashes"));
  const ipc::PinRequest request{{hashes.begin(), hashes.end()}};
  KVFERRY_ASSIGN(const auto reply, link.call<ipc::PinReply>(kind, request, deadline));
  return reply.pinned;
}

ipc::PinBlocks pins_of(std::span<const PinWanted> wanted) {
  ipc::PinBlocks message;
  message.blocks.reserve(wanted.size());
  message.parts.reserve(wanted.size());
  for (const PinWanted& one : wanted) {
    message.blocks.push_back({one.block.group, one.block.key});
    message.parts.push_back(one.parts);
  }
  return message;
}

}  // namespace

Result<std::uint32_t> Client::pin(std::span<const Digest> hashes, Deadline deadline) {
  return count_pins(impl_->link, MessageKind::kPin, hashes, deadline);
}

Result<std::uint32_t> Client::unpin(std::span<const Digest> hashes, Deadline deadline) {
  return count_pins(impl_->link, MessageKind::kUnpin, hashes, deadline);
}

Result<std::vector<bool>> Client::pin_blocks(std::span<const PinnedBlock> blocks,
                                             Deadline deadline) {
  std::vector<PinWanted> wanted;
  wanted.reserve(blocks.size());
  for (const PinnedBlock& block : blocks) wanted.push_back({block});
  KVFERRY_ASSIGN(const std::vector<PinOutcome> outcomes, pin_parts(wanted, deadline));
  std::vector<bool> there;
  there.reserve(outcomes.size());
  for (const PinOutcome& outcome : outcomes) there.push_back(outcome.pinned);
  return there;
}

Result<std::vector<PinOutcome>> Client::pin_parts(std::span<const PinWanted> wanted,
                                                  Deadline deadline) {
  if (wanted.empty()) return std::vector<PinOutcome>{};
  KVFERRY_TRY(check_count(wanted.size(), "blocks to pin"));
  const ipc::PinBlocks message = pins_of(wanted);
  const auto reply =
      impl_->link.call<ipc::PinBlocksReply>(MessageKind::kPinBlocks, message, deadline);
  if (!reply) {
    // The manager may still get to it, and then to this: it takes back what that pinned. A unit
    // that lacked parts may have an earlier pin, which stays.
    if (reply.error().code == ErrorCode::kTimeout) {
      const Status undone = impl_->link.send_only(MessageKind::kUnpinBlocks, ipc::encode(message));
      if (!undone) {
        ipc::log_warn("client: {} blocks stay pinned if the manager ever answers: {}",
                      wanted.size(), undone.error().to_string());
      }
    }
    return reply.error();
  }
  if (reply->done.size() != wanted.size() || reply->lacking.size() != wanted.size()) {
    return bad_reply("{} answers, {} of parts, for {} blocks to pin", reply->done.size(),
                     reply->lacking.size(), wanted.size());
  }
  std::vector<PinOutcome> outcomes;
  outcomes.reserve(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    outcomes.push_back({reply->done[i] != 0, reply->lacking[i] & wanted[i].parts});
  }
  return outcomes;
}

Status Client::unpin_blocks(std::span<const PinnedBlock> blocks) {
  if (blocks.empty()) return ipc::ok();
  KVFERRY_TRY(check_count(blocks.size(), "blocks to unpin"));
  ipc::PinBlocks message;
  message.blocks.reserve(blocks.size());
  for (const PinnedBlock& block : blocks) message.blocks.push_back({block.group, block.key});
  return impl_->link.send_only(MessageKind::kUnpinBlocks, ipc::encode(message));
}

}  // namespace kvferry::worker
