// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/own_thread.hpp"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

/// The NUMA nodes that the machine's NVIDIA GPUs are on, each once, in order, from sysfs: host
/// memory elsewhere is reached by a GPU through the link between sockets. Empty where the machine
/// has one node, no GPU, or does not tell.
[[nodiscard]] std::vector<int> gpu_numa_nodes();
/// "0,2" or "1": what a user names. kInvalidArgument says which number is none of a node here.
[[nodiscard]] Result<std::vector<int>> parse_numa_nodes(std::string_view text);

class HugePageMaker;

/// Gives a pool (SharedMemory::create_pool without `reserve`) its pages, from the start on, by
/// several threads beside whoever uses it already: zeroing 64 GiB takes one thread 10 s and more.
/// @threading constructor and destructor one thread; calls back from its own threads.
/// @lifetime the descriptor is duplicated. The destructor ends it within one piece of each thread.
class PoolFiller {
 public:
  /// The threads take turns at pieces of this size.
  static constexpr std::uint64_t kPieceBytes = 64ULL << 20;

  struct Options {
    std::string name;  ///< Of the pool, for messages.
    std::uint64_t size_bytes = 0;
    std::uint32_t threads = 0;  ///< 0: a quarter of the processors, 1 to 8.
    /// Where its pages are to be, one after the other; empty: anywhere.
    std::vector<int> numa_nodes = {};
    /// Those of 2 MiB where the kernel makes them, as also where it does not by itself: they are
    /// there in a fraction of the time, given back in a hundredth, and a device reaches scattered
    /// chunks in them faster.
    bool huge_pages = true;
    std::uint64_t from_bytes = 0;  ///< So much from the start is there: in use, maybe.
  };
  /// on_filled: so many bytes from the start are there, no fewer than before. on_failed: once; no
  /// more will be.
  PoolFiller(const UniqueFd& fd,
             Options options,
             std::function<void(std::uint64_t)> on_filled,
             std::function<void(const Error&)> on_failed);
  PoolFiller(const PoolFiller&) = delete;
  PoolFiller& operator=(const PoolFiller&) = delete;
  ~PoolFiller();

  /// Until so many bytes are there; give_up is asked several times a second. kCancelled; the error
  /// that on_failed told.
  [[nodiscard]] Status wait_filled(std::uint64_t size_bytes, const std::function<bool()>& give_up);
  /// What it filled that the kernel made huge pages of: nothing of a pool of reserved ones.
  [[nodiscard]] std::uint64_t huge_page_bytes() const noexcept;

 private:
  void run();
  [[nodiscard]] std::optional<std::uint64_t> take_piece();
  [[nodiscard]] Status fill(std::uint64_t piece) const;
  [[nodiscard]] std::uint64_t filled_bytes() const;  ///< @pre mutex_ is held.

  const UniqueFd fd_;
  const Options options_;
  const std::unique_ptr<HugePageMaker> huge_pages_;
  const std::function<void(std::uint64_t)> on_filled_;
  const std::function<void(const Error&)> on_failed_;
  std::mutex mutex_;  ///< Guards all below but the threads. Calls back under it, in order.
  std::condition_variable changed_;
  std::vector<bool> filled_;  ///< By piece.
  std::uint64_t next_ = 0;
  std::uint64_t complete_ = 0;  ///< Pieces from the start that are filled.
  bool stopping_ = false;
  std::optional<Error> failure_;
  std::vector<std::unique_ptr<OwnThread>> threads_;
};

}  // namespace kvferry::ipc
