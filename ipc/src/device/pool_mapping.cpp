// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/pool_mapping.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "os/numa_nodes.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

/// Another thread registers the piece meanwhile, which takes the driver 2 ms, and as long as the
/// kernel needs for pages that are not there yet.
constexpr std::chrono::seconds kRegisterTime{10};

}  // namespace

PoolMapping::Pieces::Pieces(Device& on,
                            SharedMapping memory,
                            std::uint64_t bytes,
                            std::vector<int> nodes)
    : device(on),
      mapping(std::move(memory)),
      size_bytes(bytes),
      numa_nodes(std::move(nodes)),
      states((bytes + kPieceBytes - 1) / kPieceBytes),
      touched(states.size()) {}

Result<std::shared_ptr<PoolMapping>> PoolMapping::map(Device& device,
                                                      UniqueFd fd,
                                                      std::uint64_t size_bytes,
                                                      Background* background,
                                                      std::vector<int> numa_nodes) {
  KVFERRY_ASSIGN(SharedMapping mapping, SharedMemory::map_pool(fd, size_bytes));
  auto pieces =
      std::make_shared<Pieces>(device, std::move(mapping), size_bytes, std::move(numa_nodes));
  std::shared_ptr<PoolMapping> made(new PoolMapping(std::move(pieces), std::move(fd), background));
  return made;
}

PoolMapping::~PoolMapping() {
  pieces_->ending = true;
  if (background_ == nullptr) {
    pieces_->give_back();
  } else {
    background_->post([pieces = pieces_] { pieces->give_back(); });
  }
}

Status PoolMapping::Pieces::ensure(std::size_t piece) {
  {
    std::unique_lock lock(mutex);
    // wait: another thread that registers the piece; kRegisterTime; its end
    const bool is_free = changed.wait_until(lock, Deadline::after(kRegisterTime).when(),
                                            [&] { return states[piece] != State::kBusy; });
    if (!is_free) {
      return KVFERRY_ERROR(kTimeout, "pool piece {}: another thread registers it for over {} s",
                           piece, kRegisterTime.count());
    }
    if (states[piece] == State::kRegistered) return ok();
    states[piece] = State::kBusy;
  }
  const std::uint64_t start = piece * kPieceBytes;
  const std::uint64_t size = std::min(kPieceBytes, size_bytes - start);
  // Pinned pages cannot be moved any more.
  move_to_nodes(mapping.data() + start, size, numa_nodes);
  Status registered = device.register_host(mapping.data() + start, size);
  {
    const std::lock_guard lock(mutex);
    states[piece] = registered ? State::kRegistered : State::kNone;
  }
  changed.notify_all();
  return registered;
}

void PoolMapping::Pieces::give_back() {
  for (std::size_t piece = 0; piece < states.size(); ++piece) {
    if (states[piece] != State::kRegistered) continue;
    if (const Status status = device.unregister_host(mapping.data() + piece * kPieceBytes);
        !status) {
      log_warn("pool piece {} not unregistered: {}", piece, status.error().to_string());
    }
  }
}

Result<void*> PoolMapping::pinned(std::uint64_t offset, std::uint64_t size_bytes) {
  const std::size_t piece = offset / kPieceBytes;
  Pieces& pieces = *pieces_;
  if (size_bytes == 0 || offset > pieces.size_bytes || size_bytes > pieces.size_bytes - offset ||
      (offset + size_bytes - 1) / kPieceBytes != piece) {
    return KVFERRY_ERROR(kInvalidArgument, "pool range at {} of {} bytes is not inside one piece",
                         offset, size_bytes);
  }
  if (pieces.states[piece].load(std::memory_order_acquire) != State::kRegistered) {
    KVFERRY_TRY(pieces.ensure(piece));
  }
  if (background_ != nullptr && !pieces.touched[piece].load(std::memory_order_relaxed) &&
      !pieces.touched[piece].exchange(true)) {
    on_first_touch(piece);
  }
  return static_cast<void*>(pieces.mapping.data() + offset);
}

std::span<const std::byte> PoolMapping::bytes(std::uint64_t offset,
                                              std::uint64_t size_bytes) const noexcept {
  if (offset > pieces_->size_bytes || size_bytes > pieces_->size_bytes - offset) return {};
  return {pieces_->mapping.data() + offset, size_bytes};
}

bool PoolMapping::is_pinned(std::uint64_t offset, std::uint64_t size_bytes) const noexcept {
  const Pieces& pieces = *pieces_;
  if (size_bytes == 0 || offset > pieces.size_bytes || size_bytes > pieces.size_bytes - offset) {
    return false;
  }
  for (std::size_t i = offset / kPieceBytes; i <= (offset + size_bytes - 1) / kPieceBytes; ++i) {
    if (pieces.states[i].load(std::memory_order_acquire) != State::kRegistered) return false;
  }
  return true;
}

void PoolMapping::pin(std::uint64_t offset,
                      std::uint64_t size_bytes,
                      std::function<void(Status)> done) {
  KVFERRY_CHECK(background_ != nullptr, "a pool is pinned by nobody");
  background_->post([pieces = pieces_, offset, size_bytes, done = std::move(done)] {
    Status pinned = ok();
    const std::uint64_t end = std::min(offset + size_bytes, pieces->size_bytes);
    for (std::uint64_t at = offset; pinned && at < end; at = (at / kPieceBytes + 1) * kPieceBytes) {
      pinned = pieces->ensure(at / kPieceBytes);
    }
    done(std::move(pinned));
  });
}

Result<void*> PoolMapping::pinned_across(std::uint64_t offset, std::uint64_t size_bytes) {
  std::uint64_t done = 0;
  do {
    const std::uint64_t at = offset + done;
    const std::uint64_t size = std::min(size_bytes - done, kPieceBytes - at % kPieceBytes);
    KVFERRY_TRY(pinned(at, size));
    done += size;
  } while (done < size_bytes);
  return static_cast<void*>(pieces_->mapping.data() + offset);
}

void PoolMapping::expect(std::span<const std::uint64_t> offsets) {
  if (background_ == nullptr) return;
  std::vector<std::size_t> missing;
  for (const std::uint64_t offset : offsets) {
    const std::size_t piece = offset / kPieceBytes;
    if (piece >= pieces_->states.size() || pieces_->states[piece] != State::kNone) continue;
    if (std::find(missing.begin(), missing.end(), piece) == missing.end()) missing.push_back(piece);
  }
  // Each a task of its own: others come in between, and what has ended by then need not be done.
  for (const std::size_t piece : missing) {
    background_->post([pieces = pieces_, piece] {
      if (pieces->ending || pieces->states[piece] != State::kNone) return;
      // Whoever copies there is told of it.
      static_cast<void>(pieces->ensure(piece));
    });
  }
}

void PoolMapping::on_first_touch(std::size_t piece) {
  std::size_t distance = 0;
  {
    const std::lock_guard lock(ahead_mutex_);
    if (last_touched_ && piece > *last_touched_) distance = piece - *last_touched_;
    const bool again = distance > 0 && distance == std::exchange(distance_, distance);
    last_touched_ = piece;
    // Neighbours are no chance.
    if (!again && distance != 1) return;
  }
  background_->post([pieces = pieces_, piece, distance] {
    for (std::size_t i = 1; i <= kAhead && !pieces->ending; ++i) {
      const std::size_t next = piece + i * distance;
      if (next >= pieces->states.size()) return;
      if (pieces->states[next] != State::kNone) continue;
      if (const Status status = pieces->ensure(next); !status) {
        log_warn("pool piece {} cannot be registered ahead of its use: {}", next,
                 status.error().to_string());
        return;
      }
    }
  });
}

std::uint64_t PoolMapping::registered() const noexcept {
  return static_cast<std::uint64_t>(
      std::count_if(pieces_->states.begin(), pieces_->states.end(),
                    [](const auto& state) { return state == State::kRegistered; }));
}

}  // namespace kvferry::ipc
