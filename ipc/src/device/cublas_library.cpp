// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cublas_library.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <dlfcn.h>

#include <array>

namespace kvferry::ipc::cublas {
namespace {

constexpr std::array kNames{"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"};

template <typename Call> Status find(void* library, const char* name, Call& call) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): what dlsym is for.
  call = reinterpret_cast<Call>(::dlsym(library, name));
  if (call != nullptr) return ok();
  return KVFERRY_ERROR(kVersionMismatch, "cuBLAS has no {}: one of CUDA 11 or newer is needed",
                       name);
}

Result<Library> load_now() {
  void* opened = nullptr;
  for (const char* name : kNames) {
    // Never closed: it has memory of its own on devices.
    opened = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (opened != nullptr) break;
  }
  if (opened == nullptr) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc's is of this thread
    const char* const why = ::dlerror();
    return KVFERRY_ERROR(kNotFound,
                         "cuBLAS is not there ({}): install it, or put the folder of {} into "
                         "LD_LIBRARY_PATH",
                         why == nullptr ? kNames.front() : why, kNames.front());
  }
  Library library;
  KVFERRY_TRY(find(opened, "cublasCreate_v2", library.create));
  KVFERRY_TRY(find(opened, "cublasDestroy_v2", library.destroy));
  KVFERRY_TRY(find(opened, "cublasSetStream_v2", library.set_stream));
  KVFERRY_TRY(find(opened, "cublasGemmEx", library.gemm_ex));
  return library;
}

}  // namespace

Result<const Library*> Library::load() {
  static const Result<Library> kLibrary = load_now();
  if (!kLibrary) return kLibrary.error();
  return &*kLibrary;
}

}  // namespace kvferry::ipc::cublas
