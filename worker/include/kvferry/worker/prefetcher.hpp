// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/worker/client.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvferry::worker {

/// What a request does when it is its turn and blocks of its prefix are still on their way.
enum class PrefetchStop : std::uint8_t {
  kBestEffort = 1,  ///< It starts with what has come.
  kWait,            ///< It waits for all, up to a deadline that is there for the worst case.
  kTimeout          ///< It waits for so long as so many blocks are worth, from when it was queued.
};
/// "best-effort", "wait", "timeout".
[[nodiscard]] std::string_view to_string(PrefetchStop stop) noexcept;
/// kInvalidArgument for any other text.
[[nodiscard]] ipc::Result<PrefetchStop> parse_prefetch_stop(std::string_view text);

struct PrefetchOptions {
  PrefetchStop stop = PrefetchStop::kBestEffort;
  ipc::Duration wait_limit = std::chrono::seconds(10);    ///< kWait: from begin().
  ipc::Duration timeout = std::chrono::milliseconds(20);  ///< kTimeout: from begin(), and more ...
  ipc::Duration timeout_per_block = std::chrono::microseconds(500);  ///< ... for each block.
  /// A prefetch is loaded in jobs of so many blocks, a few at a time: what has come is usable, and
  /// what is cancelled has mostly not begun. @pre > 0
  std::size_t blocks_per_job = 16;
  std::uint8_t priority = ipc::Urgency::kAhead;  ///< Of Client::submit_load().
};

struct PrefetchCounts {
  std::uint64_t requests = 0;   ///< With a prefetch.
  std::uint64_t asked = 0;      ///< Blocks of them.
  std::uint64_t arrived = 0;    ///< Of those: loaded while they were wanted.
  std::uint64_t failed = 0;     ///< Not loaded, or behind one that was not.
  std::uint64_t cancelled = 0;  ///< Stopped before they came.
};

/// Loads the prefixes of queued requests from host memory before it is their turn. The engine has
/// blocks for them and decides which requests; this one makes jobs of them, below the priority of
/// loads, and says when a request is to start. Answers to its jobs come back to it from the
/// engine's poll(). Nothing blocks. @threading one thread.
class Prefetcher {
 public:
  using Id = std::uint64_t;  ///< Of the engine's making, never one of before.
  /// What it asks of a client.
  struct Transport {
    /// As Client::submit_load().
    std::function<ipc::Result<ipc::JobId>(
        std::span<const LoadItem> items, std::uint8_t priority, std::optional<ipc::TimePoint> due)>
        load;
    std::function<void(ipc::JobId job)> cancel;  ///< As Client::cancel().
  };
  Prefetcher(PrefetchOptions options, Transport transport);

  /// items: in the order of their use, which is that of their arrival; their blocks are the
  /// engine's to keep for each item until it has landed. An error means that no job was sent, and
  /// the prefetch is none. @pre items are not empty
  [[nodiscard]] ipc::Status begin(Id id, std::vector<LoadItem> items, ipc::TimePoint now);
  [[nodiscard]] bool is_known(Id id) const { return prefetches_.contains(id); }

  /// Items whose target no copier touches any more.
  struct Landing {
    Id id = 0;
    bool wanted = false;  ///< Not stopped when it came: what is loaded may be used.
    std::vector<LoadItem> items;
    /// Of each item, as Completion::results: 0 for what was loaded, kNotFound for what host memory
    /// does not have, kCancelled for what was never sent.
    std::vector<std::uint8_t> results;
    std::uint64_t bytes = 0;     ///< Moved over the link.
    ipc::TimePoint submitted{};  ///< The job.
  };
  /// Nothing: another one's job. Items that were never sent land with the job that ends the
  /// prefetch.
  [[nodiscard]] std::optional<Landing> on_completion(const Completion& completion,
                                                     ipc::TimePoint now);

  /// Whether a request may start now that it is its turn; if not, when to look again, at the
  /// latest: sooner when something has landed. Unknown ones may.
  struct Turn {
    bool starts = true;
    ipc::TimePoint look_again{};
  };
  [[nodiscard]] Turn turn(Id id, ipc::TimePoint now) const;
  /// It is not wanted any more: its request starts, was cancelled, or the device holds other
  /// memory. What is under way is cancelled and lands later, as not wanted. Returns the items that
  /// were never sent: no copier will touch their targets. No effect for an unknown one.
  [[nodiscard]] std::vector<LoadItem> stop(Id id);

  /// Jobs whose completions have not come.
  [[nodiscard]] std::size_t under_way() const noexcept { return jobs_.size(); }
  [[nodiscard]] const PrefetchCounts& counts() const noexcept { return counts_; }

 private:
  struct Prefetch {
    std::vector<LoadItem> items;
    std::size_t sent = 0;  ///< Of the items, the first ones.
    std::size_t jobs = 0;  ///< Under way.
    ipc::TimePoint begun{};
  };
  struct Job {
    Id id = 0;
    std::vector<LoadItem> items;
    ipc::TimePoint submitted{};
    bool wanted = true;
  };
  [[nodiscard]] ipc::TimePoint deadline_of(const Prefetch& prefetch) const;
  [[nodiscard]] ipc::Status send_more(Id id, Prefetch& prefetch, ipc::TimePoint now);

  PrefetchOptions options_;
  Transport transport_;
  std::map<Id, Prefetch> prefetches_;  ///< Wanted ones, until they are stopped.
  std::unordered_map<ipc::JobId, Job> jobs_;
  PrefetchCounts counts_;
};

}  // namespace kvferry::worker
