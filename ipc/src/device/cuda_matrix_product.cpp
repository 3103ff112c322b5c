// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_matrix_product.hpp"

#include "device/cublas_library.hpp"
#include "device/cuda_operations.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/device/await_stream.hpp"

#include <chrono>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kElementBytes = 2;
constexpr std::chrono::seconds kZeroTime{10};
constexpr std::uint64_t kMostRows = 1ULL << 20;

class CudaMatrixProduct final : public MatrixProduct {
 public:
  CudaMatrixProduct(ContextPtr context, const cublas::Library& library, const MatrixShape& shape)
      : context_(std::move(context)), library_(library), shape_(shape) {}
  CudaMatrixProduct(const CudaMatrixProduct&) = delete;
  CudaMatrixProduct& operator=(const CudaMatrixProduct&) = delete;
  ~CudaMatrixProduct() override {
    if (handle_ == nullptr) return;
    const DeviceGuard guard(*context_);
    if (const int code = library_.destroy(handle_); code != cublas::kSuccess) {
      log_warn("cublasDestroy: status {}", code);
    }
  }

  [[nodiscard]] Status prepare(Device& device) {
    const std::uint64_t a = shape_.m * shape_.k;
    const std::uint64_t b = shape_.k * shape_.n;
    const std::uint64_t c = shape_.m * shape_.n;
    KVFERRY_ASSIGN(memory_,
                   device.allocate((a + b + c) * kElementBytes, HandleKind::kLegacy, nullptr));
    a_ = memory_->address();
    b_ = a_ + a * kElementBytes;
    c_ = b_ + b * kElementBytes;
    KVFERRY_ASSIGN(const auto stream, device.make_stream(StreamPriority::kNormal));
    EventFd done;
    KVFERRY_TRY(stream->zero(a_, (a + b + c) * kElementBytes));
    KVFERRY_TRY(await_stream(*stream, done, Deadline::after(kZeroTime), "zeroing of matrices"));
    const DeviceGuard guard(*context_);
    return check(library_.create(&handle_), "cublasCreate");
  }

  [[nodiscard]] Status enqueue(Stream& stream) override {
    auto* const own = dynamic_cast<CudaOperations*>(&stream);
    if (own == nullptr) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "a product of matrices of a CUDA device on a stream of another one");
    }
    const DeviceGuard guard(*context_);
    const float one = 1;
    const float zero = 0;
    const int m = static_cast<int>(shape_.m);
    const int n = static_cast<int>(shape_.n);
    const int k = static_cast<int>(shape_.k);
    KVFERRY_TRY(check(library_.set_stream(handle_, own->stream()), "cublasSetStream"));
    // Column-major: the transposed product of the transposed matrices is ours.
    return check(library_.gemm_ex(handle_, cublas::kNotTransposed, cublas::kNotTransposed, n, m, k,
                                  &one, b_.raw(), cublas::kBfloat16, n, a_.raw(), cublas::kBfloat16,
                                  k, &zero, c_.raw(), cublas::kBfloat16, n, cublas::kCompute32F,
                                  cublas::kAnyAlgorithm),
                 "cublasGemmEx");
  }

 private:
  [[nodiscard]] static Status check(int code, const char* call) {
    if (code == cublas::kSuccess) return ok();
    return KVFERRY_ERROR(kCuda, "{}: status {}", call, code);
  }

  ContextPtr context_;
  const cublas::Library& library_;
  const MatrixShape shape_;
  std::unique_ptr<DeviceMemory> memory_;
  DevicePtr a_;
  DevicePtr b_;
  DevicePtr c_;
  cublas::Handle handle_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<MatrixProduct>> make_cuda_matrix_product(Device& device,
                                                                ContextPtr context,
                                                                const MatrixShape& shape) {
  for (const std::uint64_t side : {shape.m, shape.n, shape.k}) {
    if (side == 0 || side > kMostRows) {
      return KVFERRY_ERROR(kInvalidArgument, "a product of {} x {} x {}: sides are 1 to {}",
                           shape.m, shape.n, shape.k, kMostRows);
    }
  }
  KVFERRY_ASSIGN(const cublas::Library* const library, cublas::Library::load());
  auto product = std::make_unique<CudaMatrixProduct>(std::move(context), *library, shape);
  KVFERRY_TRY(product->prepare(device));
  return std::unique_ptr<MatrixProduct>(std::move(product));
}

}  // namespace kvferry::ipc
