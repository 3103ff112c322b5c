// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Weights that rank 0 broadcasts to the devices of all ranks: each copies its part into the
// transient memory of the load.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "weights_store.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace kvferry::worker {

using ipc::BroadcastWait;
using ipc::Deadline;
using ipc::Result;
using ipc::Status;

namespace {

constexpr std::chrono::seconds kLeaves{2};

}  // namespace

Result<ipc::BroadcastPort> WeightsStore::broadcast_port() {
  if (!broadcasts_) {
    return KVFERRY_ERROR(kNotFound, "it was started with --weights-broadcast messages");
  }
  KVFERRY_ASSIGN(ipc::BroadcastPort port, device_.broadcast_port());
  if (group_ && !group_->check()) drop_group();
  if (group_) port.group = ipc::group_name(group_id_);
  return port;
}

Result<ipc::BroadcastId> WeightsStore::open_broadcast(const std::string& file, bool again) {
  opened_.reset();
  // What would fail with any file, before a group is opened that nobody could end (BroadcastRoot).
  KVFERRY_TRY(let_go_of_last());
  KVFERRY_TRY(check_not_released());
  KVFERRY_ASSIGN(SafetensorsFile opened, SafetensorsFile::open(file));
  if (opened.tensors().empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "weights file {} holds no tensor", file);
  }
  KVFERRY_TRY(check_same(opened.tensors(), fmt::format("weights file {}", file)));
  std::unique_ptr<ipc::BroadcastRoot> root;
  if (!again || !group_) {
    drop_group();  // Before the next one takes memory.
    KVFERRY_ASSIGN(root, device_.open_broadcast());
  }
  ipc::BroadcastId id = root ? root->id() : group_id_;
  opened_.emplace(WeightsBroadcast::Opened{std::move(opened), id, std::move(root)});
  return id;
}

void WeightsStore::drop_group() {
  group_.reset();
  group_id_.clear();
}

// Kept from one update to the next: to form one takes NCCL half a second.
Result<std::unique_ptr<ipc::BroadcastGroup>> WeightsStore::group_for(const ipc::BroadcastId& id,
                                                                     const BroadcastWait& wait) {
  auto kept = std::move(group_);
  const bool same = group_id_ == id;
  group_id_.clear();
  if (kept && same) return kept;
  kept.reset();
  return WeightsBroadcast::join(device_, id, {rank_.value, ranks_},
                                opened_ ? opened_->root.get() : nullptr, wait);
}

Result<std::uint64_t> WeightsStore::prepare_broadcast(const ipc::BroadcastId& id,
                                                      Deadline deadline) {
  prepared_ = {};
  KVFERRY_TRY(let_go_of_last());
  KVFERRY_TRY(check_not_released());
  if ((rank_.value == 0) != opened_.has_value() || (opened_ && opened_->id != id)) {
    return KVFERRY_ERROR(kStaleEpoch,
                         "rank {} has {} open for this broadcast: ask for the update again",
                         rank_.value, opened_ ? "another file" : "no file");
  }
  const BroadcastWait wait{deadline, cancelled_};
  auto group = group_for(id, wait);
  auto opened = std::exchange(opened_, std::nullopt);
  if (!group) return group.error();
  KVFERRY_ASSIGN(broadcast_, WeightsBroadcast::start(device_, allocator_, *stream_,
                                                     std::move(group).value(), std::move(opened)));
  auto taken = take_broadcast_safely(wait);
  if (taken) {
    group_ = broadcast_->keep_group();
    group_id_ = id;
    broadcast_.reset();
  } else {
    leave_broadcast();
  }
  return taken;
}

// Whatever an engine's memory is short of: the other ranks are not to wait for this one.
Result<std::uint64_t> WeightsStore::take_broadcast_safely(const BroadcastWait& wait) {
  try {
    return take_broadcast(wait);
  } catch (const std::exception& error) {
    return KVFERRY_ERROR(kSystem, "rank {} could not take what rank 0 broadcasts: {}", rank_.value,
                         error.what());
  }
}

WeightsStore::~WeightsStore() {
  drop_group();
  if (broadcast_) broadcast_->end();  // Before the stream, which waits for it.
}

// Its stream ends soon then, and with it the use of what was to be prepared.
void WeightsStore::leave_broadcast() {
  broadcast_->end();
  if (const Status told = stream_->notify(copied_.fd()); told) {
    (void)await_stream(*stream_, copied_, Deadline::after(kLeaves), "leaving a broadcast");
  }
  (void)let_go_of_last();  // What still runs keeps it until the next look.
}

// committing_ and broadcast_ hold what the stream works on, until it was seen to end.
Result<std::uint64_t> WeightsStore::take_broadcast(const BroadcastWait& wait) {
  KVFERRY_ASSIGN(const auto tensors, broadcast_->tensors(wait));
  KVFERRY_TRY(check_same(tensors, "the file that rank 0 broadcasts"));
  ++loads_;
  Load& load = committing_;
  std::uint64_t total = 0;
  KVFERRY_TRY(start_folding(load));
  // All memory before the first piece: while one is on its way the device waits for other ranks,
  // and giving cached memory back to the driver would wait for the device.
  for (const TensorInfo& tensor : tensors) {
    KVFERRY_TRY(add_part(tensor, load));
    total += load.parts.back().size_bytes;
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    KVFERRY_TRY(take_pieces(tensors[i], load.parts[i], load, wait));
  }
  KVFERRY_TRY(broadcast_->finish(wait));
  if (is_layerwise()) KVFERRY_TRY(make_layer(load, /*with_transient=*/false));
  KVFERRY_TRY(tables_.memory(wait.deadline));
  KVFERRY_TRY(read_folded(load, wait.deadline));
  prepared_ = std::exchange(committing_, {});
  ipc::log_info("weights: rank {} took {} of {} tensors that rank 0 broadcast", rank_.value,
                ipc::format_size(total), prepared_.parts.size());
  return total;
}

Status WeightsStore::take_pieces(const TensorInfo& tensor,
                                 const Prepared& part,
                                 Load& load,
                                 const BroadcastWait& wait) {
  static_assert(WeightsBroadcast::kPieceBytes % kReadBytes == 0, "pieces are folded in such steps");
  const Share share = share_of(tensor);
  const ipc::DevicePtr target = part.transient.address();
  for (std::uint64_t done = 0; done < tensor.size_bytes; done += WeightsBroadcast::kPieceBytes) {
    const std::uint64_t length = std::min(WeightsBroadcast::kPieceBytes, tensor.size_bytes - done);
    KVFERRY_ASSIGN(const ipc::DevicePtr piece,
                   broadcast_->piece(tensor.offset + done, length, wait));
    const std::uint64_t start = std::max(done, share.start);
    const std::uint64_t end = std::min(done + length, share.start + share.size_bytes);
    if (start < end) {
      KVFERRY_TRY(stream_->copy_within(piece + (start - done), target + (start - share.start),
                                       end - start));
    }
    if (shares_table_) KVFERRY_TRY(fold_piece(piece, length, load));
    KVFERRY_TRY(broadcast_->done_with_piece());
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
