// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The weights' device memory, given up and taken back: through host memory, bit for bit, or without
// what it held.
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "weights_store.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Result;
using ipc::Status;

namespace {

constexpr std::uint64_t kTablesBytes = 2 * ModelTables::kTableBytes;

}  // namespace

std::uint64_t WeightsStore::total_bytes() const {
  std::uint64_t total = kTablesBytes;
  for (const LoadedTensor& tensor : tensors_) total += offloaded_ ? 0 : tensor.size_bytes;
  return total;
}

Result<std::uint64_t> WeightsStore::release(ipc::WeightsBackup kind, Deadline deadline) {
  if (released_) return 0;
  prepared_ = {};
  drop_group();
  KVFERRY_TRY(let_go_of_last());
  Released released;
  if (kind == ipc::WeightsBackup::kHost) {
    KVFERRY_ASSIGN(released.backup, back_up(deadline));
  }
  const std::uint64_t bytes = total_bytes();
  for (LoadedTensor& tensor : tensors_) {
    tensor.memory = {};
    if (kind == ipc::WeightsBackup::kNone) tensor.host = {};
  }
  tables_.release();
  released_ = std::move(released);
  note_device_bytes();
  return bytes;
}

Result<WeightsStore::Backup> WeightsStore::back_up(Deadline deadline) {
  Backup backup;
  try {
    for (const LoadedTensor& tensor : tensors_) {
      backup.tensors.emplace_back(offloaded_ ? 0 : tensor.size_bytes);
    }
    backup.tables.resize(kTablesBytes);
  } catch (const std::bad_alloc&) {
    return KVFERRY_ERROR(kNoHostMemory,
                         "a backup of rank {}'s weights, {}, does not fit this process: release "
                         "them without one, and update them after the resume",
                         rank_.value, ipc::format_size(total_bytes()));
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (backup.tensors[i].empty()) continue;
    KVFERRY_TRY(copy_out(tensors_[i].memory.address(), backup.tensors[i], deadline));
  }
  KVFERRY_ASSIGN(const ipc::DevicePtr tables, tables_.address(deadline));
  KVFERRY_TRY(copy_out(tables, backup.tables, deadline));
  return backup;
}

Status WeightsStore::copy_out(ipc::DevicePtr from, std::span<std::byte> to, Deadline deadline) {
  for (std::size_t done = 0; done < to.size(); done += kBounceBytes) {
    const std::size_t length = std::min<std::size_t>(kBounceBytes, to.size() - done);
    const std::array ops{ipc::CopyOp{bounce_->data(), from + done, length}};
    KVFERRY_TRY(stream_->copy(ipc::CopyDirection::kDeviceToHost, ops, ipc::CopyMode::kEach));
    KVFERRY_TRY(stream_->notify(copied_.fd()));
    KVFERRY_TRY(await_stream(*stream_, copied_, deadline, "copying weights to host memory"));
    std::memcpy(to.data() + done, bounce_->data(), length);
  }
  return ipc::ok();
}

Result<std::uint64_t> WeightsStore::resume(Deadline deadline) {
  if (!released_) return 0;
  KVFERRY_TRY(let_go_of_last());
  Load& load = committing_;  // Holds the memory while the stream may write into it.
  const auto give_up = [this](const ipc::Error& error) {
    (void)let_go_of_last();  // What still runs keeps it until the next look.
    return error;
  };
  for (const LoadedTensor& tensor : tensors_) {
    Prepared& part = load.parts.emplace_back();
    if (tensor.size_bytes == 0 || offloaded_) continue;
    auto memory = allocator_.allocate(tensor.size_bytes);
    if (!memory) return give_up(memory.error());
    part.memory = std::move(*memory);
  }
  if (const auto tables = tables_.memory(deadline); !tables) return give_up(tables.error());
  if (released_->backup) {
    if (const Status filled = restore(load, *released_->backup, deadline); !filled) {
      return give_up(filled.error());
    }
    tables_.set_holds_weights();
  } else {
    ipc::log_warn("weights: rank {} has none until they are updated", rank_.value);
  }
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].memory = std::move(load.parts[i].memory);
  }
  committing_ = {};
  released_.reset();
  note_device_bytes();
  return total_bytes();
}

Status WeightsStore::restore(const Load& load, const Backup& backup, Deadline deadline) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (backup.tensors[i].empty()) continue;
    KVFERRY_TRY(copy(backup.tensors[i], load.parts[i].memory.address(), deadline));
  }
  KVFERRY_ASSIGN(const ipc::DevicePtr tables, tables_.memory(deadline));
  return copy(backup.tables, tables, deadline);
}

}  // namespace kvferry::worker
