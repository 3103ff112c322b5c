// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/pool_memory.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"

#include <sys/types.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// A host pool outlives its manager: whoever copies to and from it keeps it, and gives it to the
/// next manager, on a socket of the instance's directory.
namespace kvferry::ipc {

struct KeeperReply;

/// The keeper's side. @threading the loop's thread. @lifetime the loop outlives it; the destructor
/// lets go of what is kept.
class PoolKeeper {
 public:
  /// Where rank_socket() puts a keeper's socket.
  static constexpr std::string_view kSocket = "keep";

  /// Throws Exception: a living process holds the name, the directory refuses.
  /// @param on_dropped whoever asked has no use for the pool: it is kept no longer
  PoolKeeper(EventLoop& loop, const std::filesystem::path& path, std::function<void()> on_dropped);
  PoolKeeper(const PoolKeeper&) = delete;
  PoolKeeper& operator=(const PoolKeeper&) = delete;
  ~PoolKeeper();

  /// Instead of what was kept before. Its manager lives: nobody else may have it, or have it
  /// dropped.
  void keep(PoolMemory memory);
  /// The manager is gone: the next one may have it.
  void offer();
  void drop();
  [[nodiscard]] bool is_offered() const noexcept { return is_offered_ && memory_.valid(); }

 private:
  void accept();
  void add(PacketSocket socket);
  void on_packet(int fd);
  void forget(int fd);
  void on_late(int fd);
  void give(int fd);
  void answer(int fd, const KeeperReply& reply, std::span<const int> fds);
  void answer_waiting();

  EventLoop& loop_;
  std::function<void()> on_dropped_;
  std::optional<PacketListener> listener_;
  struct Asker {
    PacketSocket socket;
    TimerId timer = 0;
    bool waits = false;  ///< For the end of our manager, of which it knows.
  };
  std::map<int, Asker> askers_;
  PoolMemory memory_;
  bool is_offered_ = false;
};

/// What a keeper has.
struct KeptPool {
  std::filesystem::path socket;
  std::string holder;  ///< The socket's name in the directory.
  pid_t pid = 0;
  bool in_use = false;  ///< Its manager lives: the descriptors are not given.
  PoolMemory memory;
};

/// It lives, and does not say whether it keeps a pool: it is stopped, or of another version.
struct SilentKeeper {
  std::string holder;  ///< The socket's name in the directory.
  pid_t pid = 0;       ///< 0: it could not even be asked.
  Error error;
};
struct KeptPools {
  std::vector<KeptPool> pools;
  std::vector<SilentKeeper> silent;
};

/// Asks every keeper of the instance. succeeds: the caller is the instance's next manager.
[[nodiscard]] KeptPools find_kept_pools(const RuntimeDir& dir, bool succeeds, Deadline deadline);
/// Has a keeper let go of a pool. kBusy: its manager lives; kNotFound: it does not keep that one.
[[nodiscard]] Status drop_kept_pool(const KeptPool& pool, Deadline deadline);

}  // namespace kvferry::ipc
