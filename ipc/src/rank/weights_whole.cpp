// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/weights_whole.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

namespace kvferry::ipc {

Status WeightsWhole::open(const RankWeightsRead& wanted) {
  drop();
  // Not a pipe or a terminal, whose reads may wait for ever.
  UniqueFd file(::open(wanted.file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) {
    return KVFERRY_ERRNO("weights file {}", wanted.file);
  }
  if (!S_ISREG(info.st_mode) || info.st_size == 0) {
    return KVFERRY_ERROR(kInvalidArgument, "weights file {}: it is {}", wanted.file,
                         S_ISREG(info.st_mode) ? "empty" : "no regular file");
  }
  file_ = std::move(file);
  upload_ = wanted.upload;
  total_ = static_cast<std::uint64_t>(info.st_size);
  return ok();
}

Result<WeightsPart> WeightsWhole::read(const RankWeightsRead& wanted) {
  if (!file_.valid() || wanted.upload != upload_) KVFERRY_TRY(open(wanted));
  WeightsPart part;
  part.upload = upload_;
  part.offset = std::min(wanted.offset, total_);
  part.total_bytes = total_;
  part.bytes.resize(static_cast<std::size_t>(
      std::min<std::uint64_t>(WeightsPart::kMaxBytes, total_ - part.offset)));
  for (std::size_t done = 0; done < part.bytes.size();) {
    const ssize_t count = ::pread(file_.get(), part.bytes.data() + done, part.bytes.size() - done,
                                  static_cast<off_t>(part.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("weights file {}", wanted.file);
    if (count == 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "weights file {} ends at byte {}; it had {}: it was cut off meanwhile",
                           wanted.file, part.offset + done, total_);
    }
    done += static_cast<std::size_t>(count);
  }
  return part;
}

Result<std::string> WeightsWhole::location(const WeightsUpload& uploads,
                                           std::string_view upload) const {
  if (!file_.valid() || upload != upload_.hex()) return uploads.complete(upload);
  return fmt::format("/proc/self/fd/{}", file_.get());
}

void WeightsWhole::drop() noexcept {
  file_.reset();
  upload_ = {};
  total_ = 0;
}

}  // namespace kvferry::ipc
