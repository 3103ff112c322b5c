// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/nccl_library.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <utility>

namespace kvferry::ipc::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr int kOldest = 21800;

std::string version_text_of(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

template <typename Call> Status find(void* library, const char* name, Call& call) {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): what dlsym is for.
  call = reinterpret_cast<Call>(::dlsym(library, name));
  if (call != nullptr) return ok();
  return KVFERRY_ERROR(kVersionMismatch, "{} has no {}: NCCL {} or newer is needed", kName, name,
                       version_text_of(kOldest));
}

Result<Library> load_now() {
  // Never closed: it has threads of its own.
  void* const opened = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc's is of this thread
    const char* const why = ::dlerror();
    return KVFERRY_ERROR(kNotFound,
                         "NCCL is not there ({}): install it, or put the folder of an engine's "
                         "{} into LD_LIBRARY_PATH",
                         why == nullptr ? kName : why, kName);
  }
  Library library;
  KVFERRY_TRY(find(opened, "ncclGetVersion", library.get_version));
  if (const int code = library.get_version(&library.version);
      code != kSuccess || library.version < kOldest) {
    return KVFERRY_ERROR(kVersionMismatch, "{} is of version {}, {} or newer is needed", kName,
                         version_text_of(library.version), version_text_of(kOldest));
  }
  KVFERRY_TRY(find(opened, "ncclGetUniqueId", library.get_unique_id));
  KVFERRY_TRY(find(opened, "ncclCommInitRankConfig", library.comm_init_rank_config));
  KVFERRY_TRY(find(opened, "ncclCommAbort", library.comm_abort));
  KVFERRY_TRY(find(opened, "ncclCommGetAsyncError", library.comm_get_async_error));
  KVFERRY_TRY(find(opened, "ncclBroadcast", library.broadcast));
  KVFERRY_TRY(find(opened, "ncclGetErrorString", library.get_error_string));
  KVFERRY_TRY(find(opened, "ncclGetLastError", library.get_last_error));
  log_info("NCCL {} is loaded", library.version_text());
  return library;
}

}  // namespace

Result<const Library*> Library::load() {
  static const Result<Library> kLibrary = load_now();
  if (!kLibrary) return kLibrary.error();
  return &*kLibrary;
}

std::string Library::version_text() const { return version_text_of(version); }

Error Library::error(int code, const char* what, Comm comm) const {
  const char* const last = get_last_error(comm);
  Error error =
      KVFERRY_ERROR(kCuda, "{}: {}{}{}", what, get_error_string(code),
                    last == nullptr || *last == '\0' ? "" : ": ", last == nullptr ? "" : last);
  if (code == kRemoteError) error.code = ErrorCode::kPeerDied;
  return error;
}

}  // namespace kvferry::ipc::nccl
