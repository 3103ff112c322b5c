// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "weights_sender.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// The manager gives every rank 15 s for a part.
constexpr ipc::Duration kPartAnswer = 20s;

}  // namespace

void WeightsSender::send(const std::filesystem::path& file, const std::string& engine, Done done) {
  done_ = std::move(done);
  name_ = file.string();
  part_ = {};
  part_.engine = engine;
  part_.upload = ipc::Digest::random();
  file_ = ipc::UniqueFd(::open(name_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (!file_.valid() || ::fstat(file_.get(), &info) != 0) {
    return finish(KVFERRY_ERRNO("open weights file {}", name_));
  }
  if (!S_ISREG(info.st_mode) || info.st_size == 0) {
    return finish(KVFERRY_ERROR(kInvalidArgument, "weights file {} is {}", name_,
                                S_ISREG(info.st_mode) ? "empty" : "no regular file"));
  }
  part_.total_bytes = static_cast<std::uint64_t>(info.st_size);
  send_next();
}

ipc::Status WeightsSender::read_next() {
  part_.bytes.resize(static_cast<std::size_t>(
      std::min<std::uint64_t>(ipc::WeightsPart::kMaxBytes, part_.total_bytes - part_.offset)));
  for (std::size_t done = 0; done < part_.bytes.size();) {
    const ssize_t count = ::pread(file_.get(), part_.bytes.data() + done, part_.bytes.size() - done,
                                  static_cast<off_t>(part_.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("read weights file {}", name_);
    if (count == 0) {
      return KVFERRY_ERROR(kInvalidArgument, "weights file {} ends at byte {}; it had {}", name_,
                           part_.offset + done, part_.total_bytes);
    }
    done += static_cast<std::size_t>(count);
  }
  return ipc::ok();
}

void WeightsSender::send_next() {
  if (part_.offset == part_.total_bytes) {
    return finish(ipc::WeightsSource{ipc::WeightsFrom::kTensors, part_.upload.hex()});
  }
  if (const auto read = read_next(); !read) return finish(read.error());
  const auto sent = calls_.ask(ipc::MessageKind::kWeightsPart, ipc::encode(part_), kPartAnswer,
                               [this](const ipc::Result<ipc::Envelope>& answer) {
                                 if (!answer) return finish(answer.error());
                                 if (answer->error) return finish(*answer->error);
                                 part_.offset += part_.bytes.size();
                                 send_next();
                               });
  if (!sent) finish(sent.error());
}

void WeightsSender::finish(ipc::Result<ipc::WeightsSource> result) {
  file_.reset();
  part_.bytes = {};
  std::exchange(done_, nullptr)(std::move(result));
}

}  // namespace kvferry::cli
