// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "key_file.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <string_view>

namespace kvferry::cli {
namespace {

constexpr std::size_t kMostBytes = 256;  // a key, and room for blanks
constexpr mode_t kOthers = S_IRWXG | S_IRWXO;
constexpr const char* kMakeOne = "make one with: (umask 077; openssl rand -hex 16 > FILE)";

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) + 1 - first);
}

ipc::Status check_owner_and_mode(const std::filesystem::path& file, const struct stat& info) {
  if (!S_ISREG(info.st_mode)) {
    return KVFERRY_ERROR(kInvalidArgument, "{} is no plain file (mode {:o}): {}", file.native(),
                         info.st_mode, kMakeOne);
  }
  if (info.st_uid != ::geteuid()) {
    return KVFERRY_ERROR(kPermission,
                         "{} belongs to uid {}, not to uid {}, which uses it: give a file of your "
                         "own",
                         file.native(), info.st_uid, ::geteuid());
  }
  if ((info.st_mode & kOthers) != 0) {
    return KVFERRY_ERROR(kPermission,
                         "{} has mode {:04o}, with which others than uid {} can have the key: make "
                         "a new one, or chmod 600 {}, if nobody has seen it",
                         file.native(), info.st_mode & 07777, ::geteuid(), file.native());
  }
  return ipc::ok();
}

}  // namespace

ipc::Result<ipc::Digest> read_key_file(const std::filesystem::path& file) {
  // O_NONBLOCK: a pipe would make us wait for its writer. Links may lead to it, as to mounted
  // secrets: what counts is whose the file is.
  const ipc::UniqueFd fd(::open(file.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!fd.valid()) return KVFERRY_ERRNO("open {}", file.native());
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("stat {}", file.native());
  KVFERRY_TRY(check_owner_and_mode(file, info));
  std::array<char, kMostBytes> buffer{};
  std::size_t filled = 0;
  while (filled < buffer.size()) {
    // wait-brief: the disk; as long as the kernel takes
    const ssize_t count = ::read(fd.get(), buffer.data() + filled, buffer.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("read {}", file.native());
    if (count == 0) break;
    filled += static_cast<std::size_t>(count);
  }
  const std::string_view text = trimmed({buffer.data(), filled});
  // The error of from_hex() has the text, which is a secret.
  const auto key = ipc::Digest::from_hex(text);
  if (filled == buffer.size() || !key) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{} has {}{} characters that are no key: a key is 32 hexadecimal digits "
                         "and nothing else; {}",
                         file.native(), text.size(), filled == buffer.size() ? " or more" : "",
                         kMakeOne);
  }
  if (key->is_zero()) {
    return KVFERRY_ERROR(kInvalidArgument, "the key in {} is zero, not 128 random bits: {}",
                         file.native(), kMakeOne);
  }
  return *key;
}

}  // namespace kvferry::cli
