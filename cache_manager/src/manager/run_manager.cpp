// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/descriptors.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/pool_filler.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "kvferry/ipc/rank/pool_keeper.hpp"
#include "manager/manager_core.hpp"
#include "manager/pool_catalogue.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

// Three for each of 4,096 peers, and room for connections of others that come and go.
constexpr std::size_t kDescriptors = 65'536;

// Processes that were killed and have no successor leave their names; living ones keep theirs.
void sweep(const ipc::RuntimeDir& dir) {
  for (const std::string& name : dir.remove_stale_names()) {
    ipc::log_info("{}: removed, left behind by a process that is gone",
                  (dir.path() / name).string());
  }
}

/// What the path of an ipc:// endpoint needs that is not there may stay away for good.
ipc::Status check_folder(std::string_view option, const std::string& endpoint) {
  constexpr std::string_view kScheme = "ipc://";
  if (!endpoint.starts_with(kScheme)) return ipc::ok();
  const std::filesystem::path folder =
      std::filesystem::path(endpoint.substr(kScheme.size())).parent_path();
  if (::access((folder / "").c_str(), W_OK | X_OK) == 0) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "{} {}: no socket can be made in {} ({}): make that folder, or give another "
                       "path",
                       option, endpoint, folder.native(), std::generic_category().message(errno));
}

void check_kv_events(const ManagerConfig& config) {
  for (const auto& [option, endpoint] :
       {std::pair("--kv-events", config.kv_events),
        std::pair("--kv-events-snapshot", config.kv_events_snapshot)}) {
    if (endpoint.empty()) continue;
    ipc::Status good = ipc::check_kv_endpoint(endpoint, /*listens=*/true);
    if (good) good = check_folder(option, endpoint);
    if (!good) throw ipc::Exception(std::move(good).error());
  }
  const bool has_snapshot = !config.kv_events_snapshot.empty();
  if (has_snapshot && (config.kv_events.empty() || config.kv_events == config.kv_events_snapshot)) {
    throw ipc::Exception(KVFERRY_ERROR(
        kInvalidArgument, "snapshots of KV events at {} and the events at '{}': give both, and two",
        config.kv_events_snapshot, config.kv_events));
  }
}

void check_config(const ManagerConfig& config) {
  if (config.max_jobs_per_engine == 0 || config.queue_deadline.count() <= 0 ||
      config.job_deadline.count() <= 0) {
    throw ipc::Exception(KVFERRY_ERROR(
        kInvalidArgument,
        "{} jobs per engine, a queue deadline of {} ms and a job deadline of {} ms: all must be "
        "positive",
        config.max_jobs_per_engine, config.queue_deadline.count(), config.job_deadline.count()));
  }
  if (config.verify_loads == VerifyLoads::kAlways && !config.checksums) {
    throw ipc::Exception(KVFERRY_ERROR(
        kInvalidArgument,
        "checksums off and verify-loads always: what has no checksum cannot be checked; give "
        "checksums on, or verify-loads off or sampled"));
  }
  check_kv_events(config);
  if (ipc::Status good = config.watermarks.check(); !good) throw ipc::Exception(good.error());
  for (const auto& [engine, share] : config.shares) {
    if (share < 1 || share > ManagerConfig::kMaxShare) {
      throw ipc::Exception(KVFERRY_ERROR(kInvalidArgument, "engine {} has a share of {}: 1 to {}",
                                         engine, share, ManagerConfig::kMaxShare));
    }
  }
}

/// What of the pool is there before anybody is served.
constexpr std::uint64_t kServesFrom = 256ULL << 20;

struct Filled {
  std::uint64_t pool_bytes = 0;
  std::uint64_t from_bytes = 0;  ///< What an earlier manager had filled.
  std::uint64_t huge_bytes = 0;  ///< Of the rest.
};

void tell_complete(const Filled& filled, ipc::TimePoint began) {
  const auto took =
      std::chrono::duration_cast<std::chrono::milliseconds>(ipc::MonotonicClock::now() - began);
  ipc::log_info(
      "host pool: all {} are there after {} ms; huge pages were made of {} of the {} filled",
      ipc::format_size(filled.pool_bytes), took.count(), ipc::format_size(filled.huge_bytes),
      ipc::format_size(filled.pool_bytes - filled.from_bytes));
}

struct KeptMemory {
  ipc::UniqueFd pool;
  std::unique_ptr<PoolCatalogue> catalogue;  ///< Null: there is none.
};

/// The time in which those that keep a pool are asked for it.
constexpr auto kAskKeepers = std::chrono::seconds(3);

struct Candidate {
  ipc::KeptPool kept;
  std::unique_ptr<PoolCatalogue> catalogue;  ///< Null: it cannot be used.
  std::string flaw;                          ///< Why not.
};

// Sizes that differ by little look alike when they are rounded.
std::string exact(std::uint64_t bytes) {
  return fmt::format("{} ({} bytes)", ipc::format_size(bytes), bytes);
}

Candidate examine(ipc::KeptPool kept, const HostPool::Stats& pool) {
  std::string flaw;
  if (kept.memory.pool_bytes == pool.bytes) {
    auto catalogue = PoolCatalogue::open(kept.memory, pool);
    if (catalogue) return {std::move(kept), std::move(catalogue).value(), {}};
    flaw = catalogue.error().to_string();
  } else {
    flaw = fmt::format(
        "it has {}, this manager's --host-memory makes {}, and only a manager with the same "
        "--host-memory takes a pool over",
        exact(kept.memory.pool_bytes), exact(pool.bytes));
  }
  ipc::log_warn("a pool that {} keeps cannot be used: {}", kept.holder, flaw);
  return {std::move(kept), nullptr, std::move(flaw)};
}

void throw_away(const Candidate& one, const ipc::Deadline& deadline) {
  if (const ipc::Status dropped = ipc::drop_kept_pool(one.kept, deadline); !dropped) {
    ipc::log_warn("{} keeps a pool that nobody wants: {}", one.kept.holder,
                  dropped.error().to_string());
    return;
  }
  ipc::log_warn(
      "the pool of {} that {} kept is thrown away, and with it all blocks that it had: {}",
      exact(one.kept.memory.pool_bytes), one.kept.holder,
      one.catalogue == nullptr ? one.flaw : "another one was served from after it");
}

/// What an earlier manager of the instance left with those that copied for it. Of several the one
/// that was served from last; the others are of no use to anybody. Before they are let go for a new
/// one: may_make says whether that can be, once so many bytes are given back.
KeptMemory take_kept_pool(const ipc::RuntimeDir& dir,
                          const HostPool::Stats& pool,
                          const std::function<ipc::Status(std::uint64_t given_back)>& may_make) {
  const ipc::Deadline deadline = ipc::Deadline::after(kAskKeepers);
  std::vector<Candidate> found;
  ipc::KeptPools asked = ipc::find_kept_pools(dir, /*succeeds=*/true, deadline);
  for (const ipc::SilentKeeper& silent : asked.silent) {
    ipc::log_warn("{} does not say whether it keeps a pool: {}", silent.holder,
                  silent.error.to_string());
  }
  for (ipc::KeptPool& kept : asked.pools) {
    if (!kept.in_use) {
      found.push_back(examine(std::move(kept), pool));
      continue;
    }
    ipc::log_info(
        "{} has not noticed the end of the earlier manager: what it keeps is not asked "
        "for again",
        kept.holder);
  }
  const auto served = [](const Candidate& one) {
    return one.catalogue == nullptr ? 0 : one.catalogue->served_ns();
  };
  const auto best = std::max_element(
      found.begin(), found.end(),
      [&served](const Candidate& a, const Candidate& b) { return served(a) < served(b); });
  KeptMemory taken;
  ipc::Digest chosen;
  if (best != found.end() && best->catalogue != nullptr) {
    chosen = best->kept.memory.id;
    ipc::log_info("{} (pid {}) has kept pool {}", best->kept.holder, best->kept.pid, chosen.hex());
    taken = {std::move(best->kept.memory.pool), std::move(best->catalogue)};
  }
  if (taken.catalogue == nullptr && !found.empty()) {
    std::uint64_t kept_bytes = 0;
    for (const Candidate& other : found) kept_bytes += other.kept.memory.pool_bytes;
    // A slip in an option is not to cost what is kept.
    if (ipc::Status good = may_make(kept_bytes); !good) throw ipc::Exception(good.error());
  }
  for (const Candidate& other : found) {
    if (other.kept.memory.id != chosen) throw_away(other, deadline);
  }
  return taken;
}

}  // namespace

void run_manager(const ManagerConfig& config) {
  check_config(config);
  if (!ipc::raise_descriptor_limit(kDescriptors)) {
    ipc::log_info(
        "this process may open fewer than {} files: with few of them, few peers are served",
        kDescriptors);
  }
  ipc::SignalFd signals;
  const auto dir = value_or_throw(ipc::RuntimeDir::open(config.runtime_dir, config.instance));
  // Before the pool: a second manager is refused at once, not after it has taken memory.
  std::optional lock(value_or_throw(ipc::NameLock::acquire(dir.path() / "manager")));
  sweep(dir);
  HostPool pool(config.pool_bytes);
  const std::uint64_t pool_bytes = pool.stats().bytes;
  const std::string pool_name = "kvferry-pool-" + dir.instance();
  // Of whole pages; before an earlier manager's pool is let go for it.
  if (ipc::Status good = config.quotas.check(pool_bytes); !good) {
    throw ipc::Exception(good.error());
  }
  KeptMemory kept = take_kept_pool(dir, pool.stats(), [&](std::uint64_t given_back) {
    return ipc::SharedMemory::check_room(pool_name, pool_bytes, config.huge_pages, given_back);
  });
  const bool adopts = kept.catalogue != nullptr;
  const ipc::UniqueFd pool_fd = adopts ? std::move(kept.pool)
                                       : value_or_throw(ipc::SharedMemory::create_large_pool(
                                             pool_name, pool_bytes, config.huge_pages));
  const std::unique_ptr<PoolCatalogue> catalogue =
      adopts ? std::move(kept.catalogue)
             : value_or_throw(PoolCatalogue::create(pool.stats(), ipc::Digest::random()));
  catalogue->set_served(ipc::MonotonicClock::now());
  pool.observe(catalogue.get());
  ipc::EventLoop loop;
  {
    // Serves with what is there: the rest comes beside it.
    pool.set_ready(adopts ? catalogue->filled_bytes() : 0);
    const ipc::TimePoint began = ipc::MonotonicClock::now();
    const std::uint64_t from_bytes = catalogue->filled_bytes();
    std::optional<ipc::PoolFiller> filler;
    if (from_bytes < pool_bytes) {
      filler.emplace(
          pool_fd,
          ipc::PoolFiller::Options{.name = pool_name,
                                   .size_bytes = pool_bytes,
                                   .numa_nodes = config.numa_nodes,
                                   .huge_pages = config.huge_pages,
                                   .from_bytes = from_bytes},
          [&](std::uint64_t filled) {
            loop.post([&pool, &catalogue, &filler, filled, pool_bytes, from_bytes, began] {
              // What an earlier manager had filled is there already.
              if (filled <= catalogue->filled_bytes()) return;
              pool.set_ready(filled);
              catalogue->set_filled(filled);
              if (filled < pool_bytes) return;
              tell_complete({pool_bytes, from_bytes, filler->huge_page_bytes()}, began);
              filler.reset();
            });
          },
          [&](const ipc::Error& error) {
            loop.post([error] { ipc::log_error("{}", error.to_string()); });
          });
      int stop_signal = 0;
      const ipc::Status first = filler->wait_filled(adopts ? 0 : kServesFrom, [&] {
        stop_signal = signals.take();
        return stop_signal != 0;
      });
      if (stop_signal != 0) {
        lock.reset();  // see below
        ipc::log_info("signal {}: the manager ends before its pool is complete", stop_signal);
        return;
      }
      if (!first) throw ipc::Exception(first.error());
    }
    ManagerCore core(loop, config, dir, pool, pool_fd.get(), *catalogue, adopts);
    loop.watch(signals.fd(), [&] {
      const int signal_number = signals.take();
      if (signal_number != 0) {
        ipc::log_info("signal {}: the manager ends", signal_number);
        core.begin_stop([&loop] { loop.stop(); });
      }
    });
    ipc::log_info("manager of instance {} is ready: {} in {}, host pool of {}{}", dir.instance(),
                  dir.registry_socket().string(), dir.path().string(), ipc::format_size(pool_bytes),
                  ipc::SharedMemory::is_of_huge_pages(pool_fd) ? " in huge pages" : "");
    const bool well = loop.run();
    // The end empties the pool, and not what is said of it: whoever keeps it may still give it on.
    pool.observe(nullptr);
    loop.unwatch(signals.fd());
    if (!well) {
      throw ipc::Exception(KVFERRY_ERROR(
          kSystem, "the manager's event loop ended by an exception: see the log before this line"));
    }
  }
  // Before the pool: giving a large one back takes the kernel seconds, and whoever loses patience
  // with that must not find names left behind.
  lock.reset();
  sweep(dir);
  ipc::log_info("manager of instance {} has ended", dir.instance());
}

}  // namespace kvferry::cache_manager
