// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "weights_broadcast.hpp"

#include "kvferry/ipc/device/await_stream.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <span>
#include <utility>

namespace kvferry::worker {

using ipc::BroadcastWait;
using ipc::Deadline;
using ipc::DevicePtr;
using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""ms;

namespace {

// Whoever fails fails the group: its own error says why, that it is gone says nothing.
Status of_group(const Status& status) {
  using ipc::ErrorCode;
  if (status || status.error().code != ErrorCode::kPeerDied) return status;
  ipc::Error error = status.error();
  error.code = ErrorCode::kCancelled;
  error.message = fmt::format("the broadcast by rank 0 came to nothing: {}", error.message);
  return error;
}

}  // namespace

Result<std::unique_ptr<ipc::BroadcastGroup>> WeightsBroadcast::join(ipc::Device& device,
                                                                    const ipc::BroadcastId& id,
                                                                    Ranks ranks,
                                                                    const ipc::BroadcastRoot* root,
                                                                    const BroadcastWait& wait) {
  auto group = device.join_broadcast({id, ranks.rank, ranks.ranks, root}, wait);
  if (!group) return of_group(group.error()).error();
  return group;
}

Result<std::unique_ptr<WeightsBroadcast>> WeightsBroadcast::start(
    ipc::Device& device,
    CachingAllocator& allocator,
    ipc::Stream& stream,
    std::unique_ptr<ipc::BroadcastGroup> group,
    std::optional<Opened> opened) {
  auto started =
      std::make_unique<WeightsBroadcast>(Start{}, stream, std::move(group), std::move(opened));
  KVFERRY_TRY(started->take_memory(device, allocator));
  return started;
}

Status WeightsBroadcast::take_memory(ipc::Device& device, CachingAllocator& allocator) {
  for (Half& half : halves_) {
    KVFERRY_ASSIGN(half.memory, allocator.allocate(kPieceBytes));
    KVFERRY_ASSIGN(half.read, device.make_pinned_buffer(kPieceBytes));
  }
  return ipc::ok();
}

// A group that failed does not end the stream by itself, and nor does a rank that hangs.
Status WeightsBroadcast::await(Half& half, const BroadcastWait& wait) {
  while (half.in_use) {
    KVFERRY_TRY(of_group(group_->check()));
    if (half.done.drain()) {
      half.in_use = false;
      break;
    }
    if (wait.cancelled.load()) {
      return KVFERRY_ERROR(kCancelled, "the update was given up while rank 0 broadcast it");
    }
    if (wait.deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "a broadcast of weights did not end: a rank hangs");
    }
    pollfd entry{half.done.fd(), POLLIN, 0};
    // wait: all ranks' part of a broadcast; deadline, of the caller, in steps of 50 ms; the failure
    // of the group, and being called off
    ::poll(&entry, 1, Deadline::after(50ms).earlier(wait.deadline).poll_timeout_ms());
  }
  return of_group(group_->check());
}

Result<DevicePtr> WeightsBroadcast::piece(std::uint64_t offset,
                                          std::uint64_t size_bytes,
                                          const BroadcastWait& wait) {
  Half& half = halves_.at(next_);
  KVFERRY_TRY(await(half, wait));
  if (opened_) {
    const std::span bytes(half.read->data(), static_cast<std::size_t>(size_bytes));
    KVFERRY_TRY(opened_->file.read(offset, bytes));
    const std::array ops{ipc::CopyOp{bytes.data(), half.memory.address(), size_bytes}};
    KVFERRY_TRY(stream_.copy(ipc::CopyDirection::kHostToDevice, ops, ipc::CopyMode::kEach));
  }
  KVFERRY_TRY(of_group(group_->broadcast(stream_, half.memory.address(), size_bytes, wait)));
  return half.memory.address();
}

Status WeightsBroadcast::done_with_piece() {
  Half& half = halves_.at(next_);
  KVFERRY_TRY(stream_.notify(half.done.fd()));
  half.in_use = true;
  next_ = (next_ + 1) % halves_.size();
  return ipc::ok();
}

Status WeightsBroadcast::finish(const BroadcastWait& wait) {
  for (Half& half : halves_) KVFERRY_TRY(await(half, wait));
  // Behind its last signal by a moment: what it brought is looked at after that.
  KVFERRY_TRY(stream_.notify(finished_.fd()));
  KVFERRY_TRY(await_stream(stream_, finished_, wait.deadline, "a broadcast of weights"));
  return of_group(group_->check());
}

Status WeightsBroadcast::exchange_piece(std::span<std::byte> bytes, const BroadcastWait& wait) {
  Half& half = halves_.at(next_);
  KVFERRY_TRY(await(half, wait));
  std::array ops{ipc::CopyOp{half.read->data(), half.memory.address(), bytes.size()}};
  if (opened_) {
    std::memcpy(half.read->data(), bytes.data(), bytes.size());
    KVFERRY_TRY(stream_.copy(ipc::CopyDirection::kHostToDevice, ops, ipc::CopyMode::kEach));
  }
  KVFERRY_TRY(of_group(group_->broadcast(stream_, half.memory.address(), bytes.size(), wait)));
  KVFERRY_TRY(stream_.copy(ipc::CopyDirection::kDeviceToHost, ops, ipc::CopyMode::kEach));
  KVFERRY_TRY(done_with_piece());
  KVFERRY_TRY(finish(wait));
  std::memcpy(bytes.data(), half.read->data(), bytes.size());
  return ipc::ok();
}

Status WeightsBroadcast::exchange(std::span<std::byte> bytes, const BroadcastWait& wait) {
  for (std::size_t done = 0; done < bytes.size(); done += kPieceBytes) {
    const std::size_t length = std::min<std::size_t>(kPieceBytes, bytes.size() - done);
    KVFERRY_TRY(exchange_piece(bytes.subspan(done, length), wait));
  }
  return ipc::ok();
}

Result<std::vector<TensorInfo>> WeightsBroadcast::tensors(const BroadcastWait& wait) {
  std::array<std::uint64_t, 2> sizes{};  // Of the header and of the file.
  if (opened_) sizes = {opened_->file.header_bytes(), opened_->file.size_bytes()};
  KVFERRY_TRY(exchange(std::as_writable_bytes(std::span(sizes)), wait));
  const auto [header_bytes, file_bytes] = sizes;
  KVFERRY_TRY(check_header_size(header_bytes, file_bytes));
  std::vector<std::byte> header(header_bytes);
  if (opened_) KVFERRY_TRY(opened_->file.read(SafetensorsFile::kHeaderStart, header));
  KVFERRY_TRY(exchange(header, wait));
  return parse_safetensors(header, header_bytes, file_bytes);
}

}  // namespace kvferry::worker
