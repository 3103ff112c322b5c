// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Weights that another process lends: copied from device to device into the transient memory of the
// load, and given back at once, so that a commit needs nobody else.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "weights_store.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Result;
using ipc::Status;

namespace {

std::vector<TensorInfo> infos_of(const WeightsImport& loan) {
  std::vector<TensorInfo> infos;
  for (const LentTensorInfo& tensor : loan.tensors()) {
    infos.push_back({tensor.name, tensor.dtype, tensor.shape, 0, tensor.size_bytes});
  }
  return infos;
}

}  // namespace

Result<std::uint64_t> WeightsStore::prepare_lent(const std::string& socket, Deadline deadline) {
  KVFERRY_ASSIGN(WeightsImport loan, WeightsImport::open(socket, deadline, cancelled_));
  const std::vector<TensorInfo> tensors = infos_of(loan);
  if (tensors.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "{} lends no tensor", loan.lender());
  }
  KVFERRY_TRY(check_same(tensors, loan.lender()));
  KVFERRY_TRY(loan.map(device_));
  loan_.emplace(std::move(loan));
  auto taken = take_lent(tensors, deadline);
  if (!taken) (void)let_go_of_last();  // What still runs keeps it until the next look.
  return taken;
}

// committing_ and loan_ hold what the stream works on, until it was seen to end.
Result<std::uint64_t> WeightsStore::take_lent(const std::vector<TensorInfo>& tensors,
                                              Deadline deadline) {
  ++loads_;
  std::uint64_t total = 0;
  Load& load = committing_;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    KVFERRY_TRY(add_part(tensors[i], load));
    const Share share = share_of(tensors[i]);
    if (share.size_bytes == 0) continue;
    KVFERRY_TRY(check_time(tensors[i], 0, deadline));
    KVFERRY_TRY(stream_->copy_within(loan_->address(i) + share.start,
                                     load.parts.back().transient.address(), share.size_bytes));
    KVFERRY_TRY(stream_->notify(copied_.fd()));
    KVFERRY_TRY(await_stream(*stream_, copied_, deadline, "copying weights that are lent"));
    KVFERRY_TRY(loan_->check_lender());
    total += share.size_bytes;
  }
  if (is_layerwise()) KVFERRY_TRY(make_layer(load, /*with_transient=*/false));
  KVFERRY_TRY(tables_.memory(deadline));
  KVFERRY_TRY(fold_lent(tensors, load));
  KVFERRY_TRY(read_folded(load, deadline));
  KVFERRY_TRY(loan_->check_lender());
  WeightsImport loan = std::move(*std::exchange(loan_, std::nullopt));
  prepared_ = std::exchange(committing_, {});
  const std::string lender = loan.lender();
  if (const Status back = loan.give_back(deadline); !back) {
    prepared_ = {};
    return back.error();
  }
  ipc::log_info("weights: rank {} copied {} of {} tensors from {}", rank_.value,
                ipc::format_size(total), prepared_.parts.size(), lender);
  return total;
}

Status WeightsStore::fold_lent(const std::vector<TensorInfo>& tensors, Load& load) {
  KVFERRY_TRY(start_folding(load));
  for (std::size_t i = 0; shares_table_ && i < tensors.size(); ++i) {
    KVFERRY_TRY(fold_piece(loan_->address(i), tensors[i].size_bytes, load));
  }
  return ipc::ok();
}

Status WeightsStore::add_part(const TensorInfo& tensor, Load& load) {
  const std::uint64_t size = share_of(tensor).size_bytes;
  Prepared part{tensor.name, describe(tensor), {}, {}, {}, size};
  if (size > 0) {
    if (lacks_memory()) {
      KVFERRY_ASSIGN(part.memory, allocator_.allocate(size));
    }
    KVFERRY_ASSIGN(part.transient, allocator_.allocate(transient_bytes(load.parts.size(), size)));
  }
  if (is_layerwise()) KVFERRY_TRY(make_room(part.host, tensor.name, size));
  load.parts.push_back(std::move(part));
  return ipc::ok();
}

Status WeightsStore::start_folding(Load& load) {
  if (!shares_table_) return ipc::ok();
  KVFERRY_ASSIGN(load.folded, allocator_.allocate(ModelTables::kTableBytes));
  return stream_->zero(load.folded.address(), ModelTables::kTableBytes);
}

// As fold_whole(), to the bit.
Status WeightsStore::fold_piece(ipc::DevicePtr piece, std::uint64_t size_bytes, Load& load) {
  for (std::uint64_t done = 0; done < size_bytes; done += kReadBytes) {
    const std::uint64_t length = std::min(kReadBytes, size_bytes - done);
    KVFERRY_TRY(stream_->fold(piece + done, length, load.folds++, load.folded.address()));
  }
  return ipc::ok();
}

Status WeightsStore::read_folded(Load& load, Deadline deadline) {
  if (!shares_table_) return ipc::ok();
  const std::array ops{
      ipc::CopyOp{bounce_->data(), load.folded.address(), ModelTables::kTableBytes}};
  KVFERRY_TRY(stream_->copy(ipc::CopyDirection::kDeviceToHost, ops, ipc::CopyMode::kEach));
  KVFERRY_TRY(stream_->notify(copied_.fd()));
  KVFERRY_TRY(await_stream(*stream_, copied_, deadline, "reading what the weights come to"));
  load.shared_table.resize(kernels::kModelWords);
  std::memcpy(load.shared_table.data(), bounce_->data(), ModelTables::kTableBytes);
  load.folded = {};
  return ipc::ok();
}

}  // namespace kvferry::worker
