// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/weights_upload.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace kvferry::ipc {

Status WeightsUpload::begin(const WeightsPart& part) {
  drop();
  UniqueFd file(::memfd_create("kvf-weights", MFD_CLOEXEC));
  if (!file.valid()) return KVFERRY_ERRNO("memfd_create for {} bytes of weights", part.total_bytes);
  file_ = std::move(file);
  upload_ = part.upload;
  total_ = part.total_bytes;
  return ok();
}

Status WeightsUpload::take(const WeightsPart& part) {
  if (part.total_bytes == 0) {
    if (part.upload == upload_) drop();
    return ok();
  }
  if (part.upload != upload_ && part.offset == 0) KVFERRY_TRY(begin(part));
  const std::uint64_t size = part.bytes.size();
  if (part.upload != upload_ || part.total_bytes != total_ || part.offset > received_ ||
      size > total_ - part.offset) {
    return KVFERRY_ERROR(kProtocol,
                         "part [{}, + {}) of {} bytes of weights {}: upload {} has {} of {} bytes "
                         "here; send it from its start",
                         part.offset, size, part.total_bytes, part.upload.hex(), upload_.hex(),
                         received_, total_);
  }
  for (std::uint64_t done = 0; done < size;) {
    const ssize_t count = ::pwrite(file_.get(), part.bytes.data() + done, size - done,
                                   static_cast<off_t>(part.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return KVFERRY_ERRNO("write {} bytes of weights to memory", total_);
    done += static_cast<std::uint64_t>(count);
  }
  received_ = std::max(received_, part.offset + size);
  return ok();
}

Result<std::string> WeightsUpload::complete(std::string_view upload) const {
  if (!file_.valid() || upload != upload_.hex() || received_ < total_) {
    return KVFERRY_ERROR(kNotFound,
                         "the upload {} of weights is not here: {} of {} bytes of upload {} are; "
                         "send all of its parts, then ask for the update",
                         upload.substr(0, 64), received_, total_,
                         file_.valid() ? upload_.hex() : "none");
  }
  return fmt::format("/proc/self/fd/{}", file_.get());
}

void WeightsUpload::drop() noexcept {
  file_.reset();
  upload_ = {};
  total_ = 0;
  received_ = 0;
}

}  // namespace kvferry::ipc
