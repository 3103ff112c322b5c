// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "model_tables.hpp"

#include "kvferry/ipc/device/await_stream.hpp"
#include "make_stream.hpp"

#include <utility>

namespace kvferry::worker {

ipc::Result<ipc::DevicePtr> ModelTables::address(ipc::Deadline deadline) {
  const std::lock_guard lock(mutex_);
  if (lost_) {
    return KVFERRY_ERROR(kNotReady,
                         "the weights were released: resume them, and update them when they were "
                         "released without a backup");
  }
  return make(deadline);
}

ipc::Result<ipc::DevicePtr> ModelTables::memory(ipc::Deadline deadline) {
  const std::lock_guard lock(mutex_);
  return make(deadline);
}

void ModelTables::release() {
  const std::lock_guard lock(mutex_);
  memory_ = {};
  lost_ = true;
}

void ModelTables::set_holds_weights() {
  const std::lock_guard lock(mutex_);
  lost_ = false;
}

ipc::Result<ipc::DevicePtr> ModelTables::make(ipc::Deadline deadline) {
  if (memory_.valid()) return memory_.address();
  KVFERRY_ASSIGN(ScratchBuffer memory, allocator_.allocate(2 * kTableBytes));
  ipc::EventFd zeroed;  // Before the stream, which may still signal it when it ends.
  const auto stream = make_stream(device_, ipc::StreamPriority::kNormal);
  KVFERRY_TRY(stream->zero(memory.address(), memory.size_bytes()));
  KVFERRY_TRY(stream->notify(zeroed.fd()));
  KVFERRY_TRY(await_stream(*stream, zeroed, deadline, "zeroing the model's tables"));
  memory_ = std::move(memory);
  return memory_.address();
}

}  // namespace kvferry::worker
