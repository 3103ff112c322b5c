// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/home_process.hpp"

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

/// A name in an instance's directory, such as "chat.0.lease", and the process that holds it; 0 when
/// that is not known.
struct HeldName {
  std::string name;
  pid_t pid = 0;
};

/// The directory of one instance: DIR/INSTANCE, mode 0700, owned by this user. DIR is the
/// --runtime-dir option, else $KVFERRY_RUNTIME_DIR, else $XDG_RUNTIME_DIR/kvferry, else
/// /tmp/kvferry-UID. All sockets and locks of an instance live here and nowhere else.
/// @lifetime whoever opened it holds a shared lock on DIR/INSTANCE; the last one on this host to
/// let go removes it, with recorded transitions and the names of processes that were killed, if
/// nothing else is in it. So keep this object longer than the names made in it.
class RuntimeDir {
 public:
  /// Creates what is missing. Errors: kInvalidArgument for a bad instance name
  /// ([A-Za-z0-9._-]{1,32}) or a path too long for a socket, kPermission for a foreign owner or a
  /// wider mode (named, never changed) and for a /proc of another pid namespace, kSystem for a
  /// read-only or full file system.
  [[nodiscard]] static Result<RuntimeDir> open(std::string_view base, std::string_view instance);
  /// For those who only look: creates and holds nothing. kNotFound when it is not there, else as
  /// open().
  [[nodiscard]] static Result<RuntimeDir> find(std::string_view base, std::string_view instance);

  /// Names of the instances in DIR, in order; none when there is no DIR.
  [[nodiscard]] static Result<std::vector<std::string>> instances(std::string_view base);

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& instance() const noexcept { return instance_; }

  [[nodiscard]] std::filesystem::path registry_socket() const { return path_ / "registry"; }
  [[nodiscard]] std::filesystem::path control_socket() const { return path_ / kControl; }
  static constexpr std::string_view kControl = "control";
  /// For rank_socket(): the control socket of a worker's step channel.
  static constexpr std::string_view kStepControl = "stepctl";
  /// For rank_socket(): where the scheduler of reference workers listens, with rank 0.
  static constexpr std::string_view kGenerate = "gen";
  static constexpr std::string_view kGenerateControl = "genctl";
  /// Where the processes of the instance record their transitions; removed with what is in it by
  /// the last one to let go.
  [[nodiscard]] std::filesystem::path transitions_folder() const { return path_ / "transitions"; }
  /// ENGINE.RANK.KIND, for example "chat.0.lease", ".agent", ".step".
  [[nodiscard]] std::filesystem::path rank_socket(std::string_view engine,
                                                  std::uint32_t rank,
                                                  std::string_view kind) const;

  /// NAME.weights: where a process lends weights. kInvalidArgument for a name that is not 1 to 64
  /// characters of [A-Za-z0-9._-].
  [[nodiscard]] Result<std::filesystem::path> weights_socket(std::string_view name) const;

  /// Removes the names (socket and lock file) of holders that are gone, as NameLock::acquire would
  /// one by one, and returns them. Never waits, and leaves alone whatever might be in use.
  [[nodiscard]] std::vector<std::string> remove_stale_names() const;
  /// The names that living processes hold now, in no order. Looks only: takes and removes nothing.
  /// A name whose holder is just starting, or whose lock file cannot be read, counts with pid 0.
  /// kSystem when the folder cannot be read.
  [[nodiscard]] Result<std::vector<HeldName>> held_names() const;

 private:
  /// The directory's descriptor and our lock on it.
  class Hold;

  [[nodiscard]] static Result<std::shared_ptr<const Hold>> make_and_hold(
      const std::filesystem::path& path);
  [[nodiscard]] static Result<std::filesystem::path> base_path(std::string_view base);
  [[nodiscard]] static Result<RuntimeDir> name(std::string_view base, std::string_view instance);

  std::filesystem::path path_;
  std::string instance_;
  /// Shared, because the copies of one process let go together.
  std::shared_ptr<const Hold> hold_;
};

/// "A lock before bind": an OFD lock on NAME.lock that the kernel drops when its holder dies. Held
/// for life, O_CLOEXEC. A name whose lock is free is stale and may be replaced. So is one whose
/// lock is held by a child that a dead holder had forked: the file names its holder by pid, start
/// time, pid and time namespace, and the kernel says that this life is over.
class NameLock {
 public:
  /// kAlreadyExists names the pid that holds it. Of several that find a stale name, one gets it.
  [[nodiscard]] static Result<NameLock> acquire(const std::filesystem::path& name);
  NameLock(NameLock&&) noexcept = default;
  NameLock& operator=(NameLock&&) noexcept;
  NameLock(const NameLock&) = delete;
  NameLock& operator=(const NameLock&) = delete;
  /// Removes NAME (when it is a socket) and NAME.lock while the lock is still held. In a forked
  /// child: nothing.
  ~NameLock();
  /// True when the name was stale and is gone. Stale, too: a lock file that a process made and
  /// died before it had locked and written it.
  static bool remove_if_stale(const std::filesystem::path& name);
  /// Removes the stale names in a folder and returns them.
  static std::vector<std::string> sweep(const std::filesystem::path& folder);

 private:
  NameLock(UniqueFd fd, std::filesystem::path name);
  UniqueFd fd_;
  std::filesystem::path name_;
  HomeProcess home_;
};

}  // namespace kvferry::ipc
