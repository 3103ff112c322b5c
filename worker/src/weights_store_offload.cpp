// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Tensors that are in host memory between two uses, as a whole or layer by layer.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "weights_store.hpp"

#include <algorithm>
#include <new>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Status;

Status WeightsStore::give_up(Deadline deadline) {
  if (strategy_ != ipc::ComponentStrategy::kOffloaded || offloaded_ || released_ ||
      tensors_.empty()) {
    return ipc::ok();
  }
  if (!prepared_.parts.empty()) {
    return KVFERRY_ERROR(kBusy, "an update of rank {}'s weights is prepared: retry when it is over",
                         rank_.value);
  }
  KVFERRY_TRY(let_go_of_last());
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (Status kept = keep_on_host(i, tensors_[i].memory.address(), deadline); !kept) {
      for (LoadedTensor& tensor : tensors_) tensor.host = {};
      return kept;
    }
  }
  for (LoadedTensor& tensor : tensors_) tensor.memory = {};
  offloaded_ = true;
  note_device_bytes();
  return ipc::ok();
}

Status WeightsStore::make_room(std::vector<std::byte>& host,
                               const std::string& name,
                               std::uint64_t size_bytes) {
  try {
    host.resize(size_bytes);
  } catch (const std::bad_alloc&) {
    return KVFERRY_ERROR(kNoHostMemory,
                         "tensor '{}' of {} does not fit this process's host memory: let the "
                         "weights be resident",
                         name, ipc::format_size(size_bytes));
  }
  return ipc::ok();
}

Status WeightsStore::keep_on_host(std::size_t tensor, ipc::DevicePtr from, Deadline deadline) {
  LoadedTensor& kept = tensors_[tensor];
  if (deadline.expired()) {
    return KVFERRY_ERROR(kTimeout, "tensor '{}' of rank {} was not in host memory by the deadline",
                         kept.name, rank_.value);
  }
  KVFERRY_TRY(make_room(kept.host, kept.name, kept.size_bytes));
  return kept.host.empty() ? ipc::ok() : copy_out(from, kept.host, deadline);
}

// Before the commit, which fails only with the device: for the largest of them.
Status WeightsStore::make_layer(Load& load, bool with_transient) {
  std::uint64_t largest = 0;
  std::uint64_t transient = 0;
  for (std::size_t i = 0; i < load.parts.size(); ++i) {
    const std::uint64_t size = load.parts[i].size_bytes;
    largest = std::max(largest, size);
    transient = std::max(transient, transient_bytes(i, size));
  }
  if (largest == 0) return ipc::ok();
  KVFERRY_ASSIGN(load.layer, allocator_.allocate(largest));
  if (with_transient) {
    KVFERRY_ASSIGN(load.layer_transient, allocator_.allocate(transient));
  }
  return ipc::ok();
}

void WeightsStore::note_device_bytes() {
  std::uint64_t bytes = 0;
  for (const LoadedTensor& tensor : tensors_) {
    if (tensor.memory.valid()) bytes += tensor.size_bytes;
  }
  device_bytes_.store(bytes);
}

}  // namespace kvferry::worker
