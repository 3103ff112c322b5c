// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/job_table.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

inline constexpr std::uint32_t kEngine = 3;
inline constexpr std::chrono::milliseconds kQueueDeadline{50'000};
inline constexpr std::chrono::milliseconds kJobDeadline{1000};

inline ipc::IncarnationId mover(std::uint32_t rank) { return ipc::Digest::from_words(1, rank); }
inline ipc::IncarnationId worker(std::uint32_t rank) { return ipc::Digest::from_words(2, rank); }
inline std::uint8_t code(ipc::ErrorCode error) { return static_cast<std::uint8_t>(error); }

/// What the table sent and finished, and what it is told about the ranks.
class JobTableTest : public testing::Test {
 protected:
  struct Sent {
    ipc::IncarnationId mover;
    ipc::MoverJob job;
  };
  struct Finished {
    std::uint64_t client_job;
    std::vector<std::uint8_t> results;
    std::string message;
    std::uint64_t bytes;
  };

  JobTable make_table(std::uint32_t max_jobs = 100) {
    JobTable::Ports ports;
    ports.targets = [this](std::uint32_t,
                           std::uint64_t generation) -> ipc::Result<std::vector<RankTarget>> {
      if (generation != generation_) {
        return KVFERRY_ERROR(kStaleEpoch, "generation {}", generation);
      }
      std::vector<RankTarget> targets;
      for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
        targets.push_back(
            {mover(rank), worker(rank), ipc::Digest::from_words(3, rank), ipc::Epoch{rank + 1}});
      }
      return targets;
    };
    ports.send = [this](const ipc::IncarnationId& to, const ipc::MoverJob& job) -> ipc::Status {
      if (to == unreachable_) {
        return KVFERRY_ERROR(kNotFound, "gone");
      }
      sent_.push_back({to, job});
      return ipc::ok();
    };
    ports.cancel = [this](const ipc::IncarnationId& to, ipc::JobId job) {
      cancelled_.emplace_back(to, job);
    };
    ports.finished = [this](Job& job) {
      std::vector<std::uint8_t> results;
      for (const JobItem& item : job.items) {
        results.push_back(item.result);
      }
      finished_.push_back({job.client_job.value, results, job.message, job.bytes});
    };
    ports.is_stopped = [this](const ipc::IncarnationId& id) { return id == stopped_; };
    ports.now = [this] { return now_; };
    JobTable::Limits limits;
    limits.max_jobs_per_engine = max_jobs;
    limits.queue_deadline = kQueueDeadline;
    limits.job_deadline = kJobDeadline;
    return JobTable(pool_, std::move(ports), limits);
  }

  HostBlockRef slot() {
    SlabShape shape;
    shape.bytes = bytes_;
    shape.ranks = ranks_;
    const auto taken = pool_.allocate(shape);
    return taken ? std::make_shared<const HostBlock>(pool_, *taken) : nullptr;
  }
  Job make_job(std::uint64_t id, JobKind kind, const std::vector<std::uint32_t>& blocks) {
    Job job;
    job.client = client_;
    job.client_job = ipc::JobId{id};
    job.engine = kEngine;
    job.kind = kind;
    job.generation = generation_;
    job.urgency.priority = job.to_host() ? 0 : 1;
    for (const std::uint32_t block : blocks) {
      JobItem item;
      item.block = ipc::BlockId{block};
      item.host = slot();
      EXPECT_NE(item.host, nullptr);
      job.items.push_back(item);
    }
    return job;
  }
  /// Urgent loads: nothing has room any more.
  void fill_window(JobTable& table) {
    for (std::uint32_t i = 0; i < SendWindow::kMostJobs; ++i) {
      Job job = make_job(i, JobKind::kLoad, {i});
      job.urgency.priority = 9;
      table.submit(std::move(job));
    }
  }
  static void answer(JobTable& table,
                     const Sent& sent,
                     std::uint8_t result = 0,
                     std::uint64_t bytes = 100) {
    ipc::MoverJobDone done;
    done.job = sent.job.job;
    done.results.assign(sent.job.items.size(), result);
    done.message = result == 0 ? "" : "it failed";
    done.bytes = bytes;
    EXPECT_TRUE(table.mover_done(sent.mover, kEngine, done).has_value());
  }

  std::uint32_t ranks_ = 2;
  std::uint64_t generation_ = 10;
  ipc::HostBlockShape bytes_{.replicated_bytes = 0, .shard_bytes = 1024};
  ipc::IncarnationId client_ = ipc::Digest::from_words(9, 9);
  ipc::IncarnationId unreachable_ = ipc::Digest::from_words(9, 10);
  ipc::IncarnationId stopped_;
  HostPool pool_{4ULL << 20U};
  ipc::TimePoint now_{std::chrono::hours(1)};
  std::vector<Sent> sent_;
  std::vector<std::pair<ipc::IncarnationId, ipc::JobId>> cancelled_;
  std::vector<Finished> finished_;
};

}  // namespace kvferry::cache_manager
