// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "compute_load.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/look.hpp"
#include "kvferry/ipc/device/await_stream.hpp"
#include "make_stream.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::DevicePtr;
using ipc::Status;
using std::chrono_literals::operator""s;

/// A quarter of the weights of a model of 8 billion parameters: 128 kernels of 32 MiB, or 1.5 ms of
/// an H100's memory.
constexpr std::uint64_t kReads = 128;
constexpr std::uint64_t kCudaReadBytes = 32ULL << 20;
constexpr std::uint64_t kHostReadBytes = 64ULL << 10;
constexpr std::uint64_t kSumBytes = kernels::kModelWords * sizeof(std::uint64_t);
constexpr ipc::MatrixShape kSquare{8192, 8192, 8192};
constexpr ipc::MatrixShape kProjection{64, 28'672, 8192};
/// Rounds take some milliseconds. From here on the thread sleeps.
constexpr auto kLook = 1s;
constexpr auto kRoundTime = 30s;
constexpr std::size_t kFlushed = 64;

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(ipc::MonotonicClock::now().time_since_epoch()).count());
}

}  // namespace

std::string_view to_string(ComputeLoadKind kind) noexcept {
  switch (kind) {
    case ComputeLoadKind::kDecode: return "decode";
    case ComputeLoadKind::kGemm: return "gemm";
    case ComputeLoadKind::kSkinny: return "skinny";
    case ComputeLoadKind::kHbm: return "hbm";
  }
  return "invalid";
}

ipc::Result<ComputeLoadKind> parse_compute_load(std::string_view text) {
  for (const ComputeLoadKind kind : kComputeLoads) {
    if (to_string(kind) == text) return kind;
  }
  return KVFERRY_ERROR(kInvalidArgument, "load '{}' is unknown; use decode, gemm, skinny or hbm",
                       text);
}

ComputeLoad::ComputeLoad(ipc::Device& device, const ComputeLoadConfig& config, Failed failed)
    : device_(device),
      times_file_(config.times_file),
      failed_(std::move(failed)),
      stream_(make_stream(device, ipc::StreamPriority::kNormal)) {
  if (Status ready = prepare(config.kind); !ready) throw ipc::Exception(std::move(ready).error());
  file_ = ipc::UniqueFd(
      ::open(times_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!file_.valid()) throw ipc::Exception(KVFERRY_ERRNO("times of a load, {}", times_file_));
  ipc::log_info("load {} runs; its times go to {}", to_string(config.kind), times_file_);
  thread_.emplace("kvf-load", ipc::OwnThread::Runs::kOurCode, [this] { run(); });
}

ComputeLoad::~ComputeLoad() {
  stopping_ = true;
  // wait-brief: the load's own thread, which was told to stop; a round, limit
  // OwnThread::kEndsWithin
  thread_->wait_end();
}

Status ComputeLoad::prepare(ComputeLoadKind kind) {
  switch (kind) {
    case ComputeLoadKind::kDecode:
    case ComputeLoadKind::kHbm: return prepare_reads(kind);
    case ComputeLoadKind::kGemm:
    case ComputeLoadKind::kSkinny: {
      const ipc::MatrixShape& shape = kind == ComputeLoadKind::kGemm ? kSquare : kProjection;
      KVFERRY_ASSIGN(product_, device_.make_product(shape));
      return ipc::ok();
    }
  }
  return KVFERRY_ERROR(kInvalidArgument, "load {} is unknown", static_cast<int>(kind));
}

Status ComputeLoad::prepare_reads(ComputeLoadKind kind) {
  const bool cuda = device_.spec().kind == ipc::DeviceKind::kCuda;
  const std::uint64_t read_bytes = cuda ? kCudaReadBytes : kHostReadBytes;
  const std::uint64_t all_bytes = kReads * read_bytes;
  KVFERRY_ASSIGN(memory_,
                 device_.allocate(all_bytes + kSumBytes, ipc::HandleKind::kLegacy, nullptr));
  const DevicePtr weights = memory_->address();
  const DevicePtr sums = weights + all_bytes;
  KVFERRY_TRY(stream_->zero(weights, all_bytes + kSumBytes));
  ipc::EventFd done;
  KVFERRY_TRY(ipc::await_stream(*stream_, done, ipc::Deadline::after(kRoundTime), "zeroing"));
  const std::uint64_t reads = kind == ComputeLoadKind::kHbm ? 1 : kReads;
  KVFERRY_ASSIGN(graph_, stream_->record([&](ipc::Stream& stream) -> Status {
    const std::uint64_t each = all_bytes / reads;
    for (std::uint64_t i = 0; i < reads; ++i) {
      KVFERRY_TRY(stream.fold(weights + i * each, each, i, sums));
    }
    return ipc::ok();
  }));
  return ipc::ok();
}

Status ComputeLoad::enqueue() {
  return product_ != nullptr ? product_->enqueue(*stream_) : stream_->launch(*graph_);
}

void ComputeLoad::run() {
  Status status = ipc::ok();
  while (status && !stopping_) status = round();
  if (status) status = flush();
  if (!status) failed_(status.error());
}

// As engines do: the next token is launched when the last one has been seen.
Status ComputeLoad::round() {
  KVFERRY_TRY(enqueue());
  ipc::Result<bool> ended = false;
  (void)ipc::look_for(kLook, [&] {
    ended = stream_->query();
    return !ended || *ended;
  });
  KVFERRY_TRY(ended);
  if (!*ended) {
    ipc::EventFd done;
    KVFERRY_TRY(ipc::await_stream(*stream_, done, ipc::Deadline::after(kRoundTime), "a load"));
  }
  ends_.push_back(now_ns());
  return ends_.size() < kFlushed ? ipc::ok() : flush();
}

Status ComputeLoad::flush() {
  const std::size_t size = ends_.size() * sizeof(ends_.front());
  // wait-none: a file
  if (size > 0 && ::write(file_.get(), ends_.data(), size) != static_cast<ssize_t>(size)) {
    return KVFERRY_ERRNO("times of a load, {}", times_file_);
  }
  ends_.clear();
  return ipc::ok();
}

std::unique_ptr<RunningLoad> start_compute_load(ipc::Device& device,
                                                const ComputeLoadConfig& config,
                                                std::function<void(const ipc::Error&)> failed) {
  return std::make_unique<ComputeLoad>(device, config, std::move(failed));
}

}  // namespace kvferry::worker
