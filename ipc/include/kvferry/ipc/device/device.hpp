// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/broadcast.hpp"
#include "kvferry/ipc/device/matrix_product.hpp"
#include "kvferry/ipc/device/stream_word.hpp"
#include "kvferry/kernels/block_layout.hpp"
#include "kvferry/kernels/reference_model.hpp"

#include <sys/types.h>

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

enum class DeviceKind : std::uint8_t { kHost = 1, kCuda = 2 };

/// How memory is shared. kLegacy: cudaIpc handles, where freeing under a living mapping is
/// undefined. kVmm: reference-counted memory behind a descriptor, stable addresses.
enum class HandleKind : std::uint8_t { kLegacy = 1, kVmm = 2 };

[[nodiscard]] std::string_view to_string(DeviceKind kind) noexcept;
[[nodiscard]] std::string_view to_string(HandleKind kind) noexcept;

/// Which device, as text: "cuda:0", or "host:NAME:SIZE" where NAME identifies one simulated device
/// among the processes of this user and SIZE is its capacity ("host:demo-0:2GiB"). Every process
/// that names the same host device shares its capacity.
struct DeviceSpec {
  DeviceKind kind = DeviceKind::kHost;
  int ordinal = 0;                        ///< CUDA only.
  std::string host_name;                  ///< Host only: [A-Za-z0-9._-]{1,64}.
  std::uint64_t host_capacity_bytes = 0;  ///< Host only.

  [[nodiscard]] static Result<DeviceSpec> parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;
};

struct MemoryInfo {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

/// A device address: never dereferenced by host code except inside the backends.
struct DevicePtr {
  std::uintptr_t address = 0;
  [[nodiscard]] DevicePtr operator+(std::uint64_t offset) const noexcept {
    return DevicePtr{address + static_cast<std::uintptr_t>(offset)};
  }
  [[nodiscard]] void* raw() const noexcept { return reinterpret_cast<void*>(address); }
  friend constexpr auto operator<=>(const DevicePtr&, const DevicePtr&) = default;
};

/// What one process sends so that another can map its memory. Legacy CUDA: token of 64 bytes, no
/// descriptor. All others: a descriptor and an empty token. Close the descriptor right after use:
/// it pins the memory.
struct ExportedHandle {
  HandleKind kind = HandleKind::kVmm;
  std::uint64_t size_bytes = 0;
  std::vector<std::uint8_t> token;
  UniqueFd fd;
};

/// Addresses set aside without memory behind them: lets memory come back at the same address after
/// a clear (VMM handles only). Outlives what is mapped into it.
class AddressRange {
 public:
  virtual ~AddressRange() = default;
  [[nodiscard]] virtual DevicePtr address() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t size_bytes() const noexcept = 0;
};

/// Follows memory beyond its release here: whether anybody else still keeps it. Exact, whatever
/// else of the device is allocated or freed meanwhile. @threading one at a time.
class MemoryTrace {
 public:
  virtual ~MemoryTrace() = default;
  /// False once no process maps the memory or holds a handle of it.
  [[nodiscard]] virtual Result<bool> is_kept() const = 0;
};

/// Memory of the device that this process allocated or imported. The destructor releases it and
/// logs a failure; release() reports it. Releasing twice is harmless.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  [[nodiscard]] virtual DevicePtr address() const noexcept = 0;
  [[nodiscard]] virtual std::uint64_t size_bytes() const noexcept = 0;
  [[nodiscard]] virtual HandleKind kind() const noexcept = 0;
  /// Only for memory that this process allocated.
  [[nodiscard]] virtual Result<ExportedHandle> export_handle() = 0;
  /// Other processes that map this memory now, where the backend can tell (host: from /proc); empty
  /// where it cannot (CUDA). Finds a dead peer's forked child before legacy memory is freed.
  [[nodiscard]] virtual Result<std::vector<pid_t>> mapped_elsewhere() {
    return std::vector<pid_t>{};
  }
  /// Taken before release(). Null where the backend cannot tell (CUDA), or after the release: then
  /// the free memory of the device is all there is to look at.
  [[nodiscard]] virtual std::unique_ptr<MemoryTrace> trace() const { return nullptr; }
  /// Allocated: unmap and free. Imported: unmap and drop the reference. After success the address
  /// faults when touched. Waits for no peer. Legacy memory that a living peer still maps: host
  /// backend aborts with a report that names the peer.
  [[nodiscard]] virtual Status release() = 0;
};

/// Which allocation of this machine: no two that exist at one time have the same, and a later one
/// does not get the id of an earlier one.
struct AllocationId {
  std::uint64_t space = 0;
  std::uint64_t number = 0;
  friend constexpr auto operator<=>(const AllocationId&, const AllocationId&) = default;
};

/// A whole allocation of this process that somebody else made and will free, such as a segment of a
/// framework's caching allocator: exported, and mapped by peers, like memory of our own. release()
/// drops what keeps the memory alive on our side and frees nothing; mapped_elsewhere(), id() and
/// still_allocated() answer after it, too.
class BorrowedMemory : public DeviceMemory {
 public:
  [[nodiscard]] virtual AllocationId id() const noexcept = 0;
  /// False once its owner freed it. Host: and no process maps it any more; CUDA looks at this
  /// process only. Meant for after release(): VMM memory that is borrowed still cannot be freed.
  [[nodiscard]] virtual Result<bool> still_allocated() = 0;
};

enum class CopyDirection : std::uint8_t { kDeviceToHost = 1, kHostToDevice = 2 };

struct CopyOp {
  void* host = nullptr;
  DevicePtr device;
  std::uint64_t size_bytes = 0;
};

/// Rows of equal size that lie at one constant distance from each other, on the device and on the
/// host: what one strided copy moves.
struct RowCopyOp {
  void* host = nullptr;  ///< Of the first row.
  std::uint64_t host_pitch = 0;
  DevicePtr device;  ///< Likewise.
  std::uint64_t device_pitch = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t rows = 0;
};

/// kEach: one asynchronous copy per op. kBatch: one batched call where the backend has one.
enum class CopyMode : std::uint8_t { kEach = 1, kBatch = 2 };

/// Regions in memory that kernels read. Made once per mapping, valid until destroyed; must outlive
/// all work launched with it.
class RegionTable {
 public:
  virtual ~RegionTable() = default;
  [[nodiscard]] virtual std::span<const kernels::StridedRegion> regions() const noexcept = 0;
};

/// Host memory that the device can write and read at full speed; for results and small staging.
class PinnedBuffer {
 public:
  virtual ~PinnedBuffer() = default;
  [[nodiscard]] virtual std::byte* data() noexcept = 0;
  [[nodiscard]] virtual std::uint64_t size_bytes() const noexcept = 0;
};

/// Work that a stream recorded and that any stream of the device can launch, any number of times,
/// also while earlier launches are under way. It holds the addresses of what it works on, not their
/// contents: whatever lies there when it runs is used, also memory that has come back at the same
/// address. Tables, buffers and host memory that the work names outlive it.
/// @threading one at a time. Where several streams launch it, the caller orders the launches.
/// @lifetime destroyed once the launches have been observed to have ended; the host backend alone
/// lets them run on after that.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
};

/// Thread blocks of a gather or a scatter, which runs beside the worker's compute: enough for the
/// link, few enough to leave the compute its multiprocessors (docs/performance.md).
inline constexpr std::uint32_t kCopyThreadBlocks = 16;

/// An ordered queue of device work. All calls enqueue and return; they run in order.
/// @threading one at a time per stream. @lifetime the destructor waits for nothing that can hang:
/// it drains with a bounded wait and logs what is left.
class Stream {
 public:
  virtual ~Stream() = default;

  /// Copies between host memory (pool or PinnedBuffer) and the device. Device-to-host sources are
  /// read in stream order, never earlier.
  [[nodiscard]] virtual Status copy(CopyDirection direction,
                                    std::span<const CopyOp> ops,
                                    CopyMode mode) = 0;
  /// The same for rows, one call for each op and no kernel. Rows may have any size, start anywhere
  /// and be any distance apart that is not less than their size; kInvalidArgument otherwise.
  [[nodiscard]] virtual Status copy_rows(CopyDirection direction,
                                         std::span<const RowCopyOp> ops) = 0;
  [[nodiscard]] virtual Status zero(DevicePtr target, std::uint64_t size_bytes) = 0;
  /// From device memory to device memory, without overlap; both may start anywhere, also in memory
  /// that was imported.
  [[nodiscard]] virtual Status copy_within(DevicePtr source,
                                           DevicePtr target,
                                           std::uint64_t size_bytes) = 0;

  /// Kernels. Only for the worker's process: a kernel from another process stops its compute.
  /// packed: device address of the packed blocks.
  [[nodiscard]] virtual Status gather(const RegionTable& table,
                                      std::span<const std::uint32_t> ids,
                                      DevicePtr packed,
                                      std::uint64_t packed_stride) = 0;
  [[nodiscard]] virtual Status scatter(const RegionTable& table,
                                       std::span<const std::uint32_t> ids,
                                       DevicePtr packed,
                                       std::uint64_t packed_stride) = 0;
  /// Of gathers and scatters from now on: each has so many thread blocks at most, of which every
  /// one may keep a multiprocessor from the compute beside it. At least 1; kCopyThreadBlocks
  /// before. Without meaning on a host device.
  virtual void limit_thread_blocks(std::uint32_t most) noexcept = 0;
  [[nodiscard]] virtual Status fill_pattern(const RegionTable& table,
                                            std::span<const kernels::SeededBlock> blocks) = 0;
  /// Adds mismatching words of blocks[i] to results[i] (64-bit words of a PinnedBuffer, zeroed by
  /// the caller).
  [[nodiscard]] virtual Status verify_pattern(const RegionTable& table,
                                              std::span<const kernels::SeededBlock> blocks,
                                              PinnedBuffer& results) = 0;
  /// results[i] (64-bit words) <- checksum of block ids[i].
  [[nodiscard]] virtual Status checksum(const RegionTable& table,
                                        std::span<const std::uint32_t> ids,
                                        PinnedBuffer& results) = 0;

  /// The reference model, see reference_model.hpp; its blocks and tokens are trusted. Outputs and
  /// sums lie in memory of the device: they are added to there.
  [[nodiscard]] virtual Status decode(const RegionTable& table,
                                      const kernels::DecodePass& pass) = 0;
  /// Adds the bytes of the source, which may start anywhere, to kernels::kModelWords 64-bit words.
  [[nodiscard]] virtual Status fold(DevicePtr source,
                                    std::uint64_t size_bytes,
                                    std::uint64_t seed,
                                    DevicePtr sums) = 0;
  /// Fills the target from the source over and over; both may start anywhere, without overlap.
  [[nodiscard]] virtual Status expand(DevicePtr source,
                                      std::uint64_t source_bytes,
                                      DevicePtr target,
                                      std::uint64_t target_bytes) = 0;

  /// The stream goes on once the word has reached the value (StreamWord::has_reached). Nothing else
  /// ends the wait: whoever enqueues it sees to it that the word gets there, whatever dies. For
  /// words of this process only.
  [[nodiscard]] virtual Status wait_word(const StreamWord& word, std::uint32_t at_least) = 0;
  /// Writes the word once all work enqueued before has ended; whoever waits for it, or reads it,
  /// finds what that work wrote.
  [[nodiscard]] virtual Status write_word(const StreamWord& word, std::uint32_t value) = 0;

  /// Records the work that the body gives to the stream that it is handed. Nothing of it runs, and
  /// nothing happens to this stream. The body copies (pinned or registered memory only), zeroes,
  /// calls kernels, and waits for and writes words; notify, query, record and launch are
  /// kInvalidArgument there. Its error is handed on.
  [[nodiscard]] virtual Result<std::unique_ptr<RecordedWork>> record(
      const std::function<Status(Stream&)>& body) = 0;
  /// kInvalidArgument for what a stream of another backend or another CUDA device recorded.
  [[nodiscard]] virtual Status launch(const RecordedWork& work) = 0;

  /// Adds one to the eventfd when all work enqueued before has ended. Not called when the device
  /// has failed: waiters poll() with a time-out and look at query(). They call it after the
  /// notification, too, before they use what the work wrote: it tells of a failure, and it orders
  /// memory.
  [[nodiscard]] virtual Status notify(int event_fd) = 0;
  /// True when all enqueued work has ended, and all eventfds of notify() have been signalled (they
  /// may be closed then); an error when the device failed. What the ended work wrote is visible to
  /// the caller. Right behind a signal it may still be false for a moment.
  [[nodiscard]] virtual Result<bool> query() = 0;
};

/// What has to be the same for a figure that was measured on a device to hold for it still. Texts,
/// for people and for comparison; empty where the backend cannot tell.
struct DeviceIdentity {
  std::string name;     ///< "NVIDIA H200".
  std::string uuid;     ///< "GPU-6d3c…".
  std::string link;     ///< "0000:3b:00.0, 32.0 GT/s PCIe x16": which slot, and what it can do.
  std::string driver;   ///< "580.159.03, CUDA 13.0".
  std::string runtime;  ///< Of CUDA, as this process uses it: "13.0".
  friend bool operator==(const DeviceIdentity&, const DeviceIdentity&) = default;
};

enum class StreamPriority : std::uint8_t { kNormal, kHigh };

/// One GPU, or one simulated one. Never changes the process's current device: CUDA calls run under
/// a guard in the calling thread.
/// @threading any. @lifetime outlives everything made from it.
class Device {
 public:
  virtual ~Device() = default;

  [[nodiscard]] virtual const DeviceSpec& spec() const noexcept = 0;
  /// Human name: "NVIDIA H200", "host device demo-0".
  [[nodiscard]] virtual std::string name() const = 0;
  /// All simulated devices of a machine have the same: what copies cost depends on the machine.
  [[nodiscard]] virtual Result<DeviceIdentity> identity() const = 0;
  /// Whose memory is near it; empty where the machine has one node, or does not tell.
  [[nodiscard]] virtual std::vector<int> numa_nodes() const { return {}; }
  /// The driver's (host backend: the kernel's) own count over all processes, not ours.
  [[nodiscard]] virtual Result<MemoryInfo> memory_info() = 0;

  [[nodiscard]] virtual Result<std::unique_ptr<AddressRange>> reserve(std::uint64_t size_bytes) = 0;
  /// Sizes are rounded up to allocation_granularity(). at (VMM only): map at the range's start.
  [[nodiscard]] virtual Result<std::unique_ptr<DeviceMemory>> allocate(std::uint64_t size_bytes,
                                                                       HandleKind kind,
                                                                       AddressRange* at) = 0;
  [[nodiscard]] virtual Result<std::unique_ptr<DeviceMemory>> import(ExportedHandle handle,
                                                                     AddressRange* at) = 0;
  [[nodiscard]] virtual std::uint64_t allocation_granularity() const noexcept = 0;

  /// The allocation that contains the address, for sharing it; kind() says by which handles.
  /// cudaMalloc memory has legacy handles; cuMemCreate memory that was made exportable as a POSIX
  /// descriptor has VMM handles; on a host device, what any Device object of this process that
  /// names it allocated. kInvalidArgument for everything else (another device, pool or managed
  /// memory, memory that was imported): the message says what it is and how to allocate instead.
  /// @lifetime whoever allocated the memory keeps it until release().
  [[nodiscard]] virtual Result<std::unique_ptr<BorrowedMemory>> borrow(DevicePtr address) = 0;

  [[nodiscard]] virtual Result<std::unique_ptr<Stream>> make_stream(StreamPriority priority) = 0;
  [[nodiscard]] virtual Result<std::unique_ptr<RegionTable>> make_region_table(
      std::vector<kernels::StridedRegion> regions) = 0;
  [[nodiscard]] virtual Result<std::unique_ptr<PinnedBuffer>> make_pinned_buffer(
      std::uint64_t size_bytes) = 0;

  /// Makes host memory reachable by copy engines at full speed. Pieces of at most 1 GiB each.
  [[nodiscard]] virtual Status register_host(void* data, std::uint64_t size_bytes) = 0;
  [[nodiscard]] virtual Status unregister_host(void* data) = 0;

  /// Load for measurements. kNotFound says what is missing for it: a GPU, or cuBLAS's library.
  [[nodiscard]] virtual Result<std::unique_ptr<MatrixProduct>> make_product(
      const MatrixShape& shape);

  /// How broadcasts of other ranks reach this device; kNotFound says what is missing for that. CUDA
  /// needs NCCL's library, which the first call loads.
  [[nodiscard]] virtual Result<BroadcastPort> broadcast_port();
  /// For rank 0 of a group: takes its seat with it, or lets it go.
  [[nodiscard]] virtual Result<std::unique_ptr<BroadcastRoot>> open_broadcast();
  /// Waits until all ranks have taken their seats. kTimeout, kCancelled, kPeerDied.
  [[nodiscard]] virtual Result<std::unique_ptr<BroadcastGroup>> join_broadcast(
      const BroadcastSeat& seat, const BroadcastWait& wait);
};

/// Throws Exception when the device cannot be opened (no driver, no such ordinal, a build without
/// CUDA, a name that is in use with another capacity).
[[nodiscard]] std::unique_ptr<Device> open_device(const DeviceSpec& spec);

/// Number of CUDA devices usable here; 0 without a driver or in a build without CUDA.
[[nodiscard]] int cuda_device_count() noexcept;

/// Used bytes of a host device over all processes, counted from /proc: every distinct memory object
/// of that device that some process maps or holds open. For leak checks from outside.
[[nodiscard]] Result<std::uint64_t> host_device_used_bytes(std::string_view host_name);

}  // namespace kvferry::ipc
