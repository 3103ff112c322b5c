// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_broadcast.hpp"

#include "device/cuda_operations.hpp"
#include "device/nccl_library.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/process.hpp"

#include <fmt/format.h>
#include <poll.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""us;

/// NCCL tells the end of a call that goes on behind it in no other way than by being asked. Most
/// are of microseconds, for which there is nothing to sleep on.
constexpr std::chrono::microseconds kSpins = 200us;
constexpr auto kRanksLook = 1ms;

class NcclRoot final : public BroadcastRoot {
 public:
  explicit NcclRoot(BroadcastId id) : id_(std::move(id)) {}
  [[nodiscard]] const BroadcastId& id() const noexcept override { return id_; }

 private:
  BroadcastId id_;
};

class NcclGroup final : public BroadcastGroup {
 public:
  NcclGroup(ContextPtr context, const nccl::Library& library)
      : context_(std::move(context)), library_(library) {}
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup() override {
    if (comm_ == nullptr) return;
    const DeviceGuard guard(*context_);
    // wait-driver: its kernels of this rank, which it tells to end; no other rank
    if (const int code = library_.comm_abort(comm_); code != nccl::kSuccess) {
      log_warn("{}", library_.error(code, "ncclCommAbort", nullptr).to_string());
    }
  }

  [[nodiscard]] Status take_seat(const BroadcastSeat& seat, const BroadcastWait& wait) {
    const DeviceGuard guard(*context_);
    nccl::UniqueId id{};
    std::memcpy(id.internal.data(), seat.id.data(), id.internal.size());
    nccl::Config config;
    const int code = library_.comm_init_rank_config(&comm_, static_cast<int>(seat.ranks), id,
                                                    static_cast<int>(seat.rank), &config);
    KVFERRY_TRY(settle(code, "ncclCommInitRankConfig", wait));
    return ok();
  }

  [[nodiscard]] Status broadcast(Stream& stream,
                                 DevicePtr memory,
                                 std::uint64_t size_bytes,
                                 const BroadcastWait& wait) override {
    auto* const own = dynamic_cast<CudaOperations*>(&stream);
    if (own == nullptr || memory.address == 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "a broadcast of {} bytes at {:#x} on a stream of {} device: it takes "
                           "memory and a stream of a CUDA device",
                           size_bytes, memory.address, own == nullptr ? "another" : "a CUDA");
    }
    const DeviceGuard guard(*context_);
    return settle(library_.broadcast(memory.raw(), memory.raw(), size_bytes, nccl::kUint8,
                                     /*root=*/0, comm_, own->stream()),
                  "ncclBroadcast", wait);
  }

  [[nodiscard]] Status check() override {
    int state = nccl::kSuccess;
    if (const int code = library_.comm_get_async_error(comm_, &state); code != nccl::kSuccess) {
      return library_.error(code, "ncclCommGetAsyncError", comm_);
    }
    if (state == nccl::kSuccess || state == nccl::kInProgress) return ok();
    return library_.error(state, "a broadcast between GPUs", comm_);
  }

 private:
  /// Until the call, which answered with that code, has come to its end.
  [[nodiscard]] Status settle(int code, const char* what, const BroadcastWait& wait) {
    const Deadline spins = Deadline::after(kSpins);
    while (code == nccl::kInProgress) {
      if (wait.cancelled.load()) {
        return KVFERRY_ERROR(kCancelled, "{} was called off before all ranks took part", what);
      }
      if (wait.deadline.expired()) {
        return KVFERRY_ERROR(kTimeout, "{} did not end in time: a rank does not take part", what);
      }
      if (!spins.expired()) {
        // wait-brief: a thread of NCCL; kSpins
        std::this_thread::yield();
      } else {
        // wait: the other ranks; kRanksLook, again until the deadline of the caller; being called
        // off, and the failure of the group
        ::poll(nullptr, 0, Deadline::after(kRanksLook).poll_timeout_ms());
      }
      if (const int asked = library_.comm_get_async_error(comm_, &code); asked != nccl::kSuccess) {
        return library_.error(asked, "ncclCommGetAsyncError", comm_);
      }
    }
    if (code != nccl::kSuccess) return library_.error(code, what, comm_);
    return ok();
  }

  ContextPtr context_;
  const nccl::Library& library_;
  nccl::Comm comm_ = nullptr;
};

}  // namespace

Result<BroadcastPort> cuda_broadcast_port(const CudaContext& context) {
  KVFERRY_ASSIGN(const nccl::Library* const library, nccl::Library::load());
  cudaDeviceProp properties{};
  KVFERRY_CUDA_TRY(cudaGetDeviceProperties(&properties, context.ordinal()));
  std::string device;
  for (const char byte : properties.uuid.bytes) {
    device += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  }
  // As NCCL tells devices apart: on what it is told to take for another host, it is another one.
  if (const std::string host = environment("NCCL_HOSTID"); !host.empty()) {
    device += fmt::format(" of {}", host);
  }
  return BroadcastPort{fmt::format("nccl {}", library->version_text()), std::move(device), {}};
}

Result<std::unique_ptr<BroadcastRoot>> open_cuda_broadcast(ContextPtr context) {
  KVFERRY_ASSIGN(const nccl::Library* const library, nccl::Library::load());
  const DeviceGuard guard(*context);
  nccl::UniqueId id{};
  if (const int code = library->get_unique_id(&id); code != nccl::kSuccess) {
    return library->error(code, "ncclGetUniqueId", nullptr);
  }
  return std::unique_ptr<BroadcastRoot>(
      std::make_unique<NcclRoot>(BroadcastId(id.internal.begin(), id.internal.end())));
}

Result<std::unique_ptr<BroadcastGroup>> join_cuda_broadcast(ContextPtr context,
                                                            const BroadcastSeat& seat,
                                                            const BroadcastWait& wait) {
  KVFERRY_ASSIGN(const nccl::Library* const library, nccl::Library::load());
  if (seat.ranks < 2 || seat.rank >= seat.ranks ||
      seat.id.size() != sizeof(nccl::UniqueId::internal)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "rank {} of {} cannot join a broadcast with an id of {} bytes, NCCL's "
                         "have {}",
                         seat.rank, seat.ranks, seat.id.size(), sizeof(nccl::UniqueId::internal));
  }
  auto group = std::make_unique<NcclGroup>(std::move(context), *library);
  KVFERRY_TRY(group->take_seat(seat, wait));
  return std::unique_ptr<BroadcastGroup>(std::move(group));
}

}  // namespace kvferry::ipc
