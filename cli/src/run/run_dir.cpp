// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/run_dir.hpp"

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <string_view>
#include <system_error>

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kLockName = "alive";
constexpr std::size_t kTokenChars = 8;

void remove_stale(const fs::path& base, const std::string& prefix) {
  std::error_code error;
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(base, error)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(prefix) && name.size() == prefix.size() + kTokenChars) {
      found.push_back(entry.path());
    }
  }
  for (const fs::path& path : found) {
    // Whoever makes one holds the directory until it has its lock: both are the kernel's word that
    // nobody uses it. Ages are not, the wall clock may jump.
    const ipc::UniqueFd folder(
        ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!folder.valid() || ::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) continue;
    const auto lock = ipc::NameLock::acquire(path / kLockName);
    if (!lock) continue;
    ipc::log_info("removing {}, left by a run that was killed", path.string());
    fs::remove_all(path, error);
  }
}

}  // namespace

ipc::Result<RunDir> RunDir::create(const std::string& base, std::string_view command) {
  const std::string prefix = fmt::format("{}-", command);
  const std::string token = ipc::Digest::random().hex().substr(0, kTokenChars);
  KVFERRY_ASSIGN(const ipc::RuntimeDir dir, ipc::RuntimeDir::open(base, prefix + token));
  remove_stale(dir.path().parent_path(), prefix);
  KVFERRY_ASSIGN(ipc::NameLock lock, ipc::NameLock::acquire(dir.path() / kLockName));
  RunDir made(dir.path(), token, std::move(lock));
  if (mkdir(made.logs().c_str(), S_IRWXU) != 0) {
    return KVFERRY_ERRNO("log directory {}", made.logs().string());
  }
  return made;
}

RunDir::~RunDir() {
  if (!lock_) return;
  std::error_code error;
  fs::remove_all(logs(), error);
  // Whatever is left in the instance's directory has been reported by name.
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, error)) {
    if (entry.is_directory(error)) fs::remove_all(entry.path(), error);
  }
  lock_.reset();
  fs::remove_all(path_, error);
  if (error) ipc::log_warn("{} was not removed: {}", path_.string(), error.message());
}

void RunDir::remove_stale_names(const std::string& instance) const {
  constexpr std::string_view kLockSuffix = ".lock";
  std::error_code error;
  std::vector<fs::path> locks;
  for (const auto& entry : fs::directory_iterator(path_ / instance, error)) {
    if (entry.path().native().ends_with(kLockSuffix)) locks.push_back(entry.path());
  }
  for (const fs::path& lock : locks) {
    const std::string& name = lock.native();
    // Taking the lock proves that its holder is dead; letting it go removes the name.
    const auto taken = ipc::NameLock::acquire(name.substr(0, name.size() - kLockSuffix.size()));
    if (!taken) {
      ipc::log_warn("{}", taken.error().to_string());
      return;  // Somebody lives: nothing else here is ours to judge.
    }
  }
  // Some sockets stand under another one's lock.
  std::vector<fs::path> sockets;
  for (const auto& entry : fs::directory_iterator(path_ / instance, error)) {
    if (entry.is_socket(error)) sockets.push_back(entry.path());
  }
  for (const fs::path& socket : sockets) fs::remove(socket, error);
  // Opened and let go: whoever is the last one in there takes the recorded transitions along.
  (void)ipc::RuntimeDir::open(path_.native(), instance);
}

std::vector<std::string> RunDir::leftovers(const std::string& instance) const {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(path_ / instance, error)) {
    names.push_back(entry.path().string());
  }
  for (const auto& entry : fs::directory_iterator("/dev/shm", error)) {
    const std::string name = entry.path().filename();
    if (name.find(token_) != std::string::npos) names.push_back(entry.path().string());
  }
  return names;
}

}  // namespace kvferry::cli
