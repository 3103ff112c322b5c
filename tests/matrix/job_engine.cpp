// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// An engine for the job cells of the matrix: on "round N" it computes blocks, stores them, loads
// them elsewhere, swaps a sequence out and in, clears, re-creates and loads again, and checks every
// block that it was told it has. On "rest N" it does no more than the first store and load: after
// it every connection is there that the instance ever has; on "layers N" it does the same layer by
// layer, beside the steps that compute and need the blocks; on "fill N" it stores many blocks. Says
// "round N ok" or "round N failed: ERROR", and before that "corrupt N K" if K words were wrong.
//
// Usage: kvferry_job_engine DIR INSTANCE GEOMETRY
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/worker/client.hpp"
#include "support/child_side.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::Deadline;
using ipc::Digest;
using ipc::GroupId;
using ipc::JobId;
using ipc::LayerTicket;
using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using worker::Client;
using worker::Completion;

constexpr GroupId kMain{0};
constexpr std::uint32_t kBlocks = 4;
constexpr std::uint32_t kComputed = 0;  ///< First of the blocks that are computed,
constexpr std::uint32_t kLoaded = 8;    ///< and of those that are loaded.
constexpr std::uint64_t kJunk = 0xdead'0000;

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> connect(const std::string& dir,
                                                 const std::string& instance,
                                                 const std::string& geometry_name) {
    KVFERRY_ASSIGN(const ipc::Geometry geometry, ipc::load_geometry(geometry_name, 1));
    worker::ClientOptions options;
    options.runtime_dir = dir;
    options.instance = instance;
    options.identity.model = "matrix";
    options.identity.fingerprint = geometry.fingerprint(ipc::ArenaOrder::kLayerFirst);
    options.identity.weights = Digest::hash("matrix", 6);
    KVFERRY_ASSIGN(auto runtime_dir, ipc::RuntimeDir::open(dir, instance));
    KVFERRY_ASSIGN(auto client, Client::connect(options, Deadline::after(5s)));
    return std::unique_ptr<Engine>(new Engine(std::move(runtime_dir), std::move(client)));
  }

  Status rest(std::uint64_t number) {
    name_blocks(number);
    KVFERRY_TRY(begin());
    KVFERRY_TRY(compute(kComputed, seed()));
    KVFERRY_TRY(store());
    KVFERRY_TRY(compute(kLoaded, kJunk));
    return load();
  }

  /// Neither the compute that is stored nor the one that needs what is loaded waits for a job's
  /// end, or a job for theirs. Every round has a use of each word.
  Status rest_by_layers(std::uint64_t number) {
    name_blocks(number);
    KVFERRY_TRY(begin());
    ipc::Step fills;
    fills.computes = LayerTicket{0, number};
    fills.fills = blocks(kComputed, seed());
    KVFERRY_ASSIGN(const JobId store, submit_store(fills.computes));
    KVFERRY_TRY(run_beside(store, std::move(fills)));
    KVFERRY_TRY(compute(kLoaded, kJunk));
    ipc::Step verifies;
    verifies.awaits = LayerTicket{1, number};
    verifies.verifies = blocks(kLoaded, seed());
    KVFERRY_ASSIGN(const JobId load, submit_load(verifies.awaits));
    return run_beside(load, std::move(verifies));
  }

  Status fill(std::uint64_t number) {
    constexpr std::uint64_t kJobs = 100;
    number_ = number;
    KVFERRY_TRY(begin());
    KVFERRY_TRY(compute(kComputed, seed()));
    for (std::uint64_t job = 0; job < kJobs; ++job) {
      hashes_.clear();
      for (std::uint64_t i = 0; i < kBlocks; ++i) {
        const std::array<std::uint64_t, 3> name{number, job, i};
        hashes_.push_back(Digest::hash(name.data(), sizeof(name)));
      }
      KVFERRY_TRY(store());
    }
    return ipc::ok();
  }

  Status round(std::uint64_t number) {
    KVFERRY_TRY(rest(number));
    KVFERRY_TRY(swap());
    KVFERRY_TRY(clear());
    KVFERRY_TRY(client_->reinit(0, Deadline::after(4s)));
    KVFERRY_TRY(client_->wait_ready(true, Deadline::after(3s)));
    KVFERRY_TRY(connect_steps());
    KVFERRY_TRY(load());
    return clear_under_a_store();
  }

 private:
  Engine(ipc::RuntimeDir dir, std::unique_ptr<Client> client)
      : dir_(std::move(dir)), client_(std::move(client)) {}

  void name_blocks(std::uint64_t number) {
    number_ = number;
    hashes_.clear();
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      const std::array<std::uint64_t, 2> name{number, i};
      hashes_.push_back(Digest::hash(name.data(), sizeof(name)));
    }
  }

  [[nodiscard]] std::uint64_t seed() const noexcept { return (number_ + 1) << 16U; }

  /// Nobody works on our blocks any more, and the cache is there.
  Status begin() {
    (void)client_->poll(1000);
    std::vector<BlockId> all;
    for (std::uint32_t i = 0; i < kLoaded + kBlocks; ++i) all.push_back(BlockId{i});
    auto released = std::make_shared<bool>(false);
    const Deadline deadline = Deadline::after(3s);
    if (!client_->release_when_done(kMain, all, [released] { *released = true; })) {
      while (!*released) {
        if (deadline.expired()) return KVFERRY_ERROR(kBusy, "jobs of earlier rounds do not end");
        (void)client_->wait_ready(true, deadline.earlier(Deadline::after(50ms)));
        (void)client_->poll(1000);
      }
    }
    if (client_->state().phase == worker::CachePhase::kCleared) {
      KVFERRY_TRY(client_->reinit(0, Deadline::after(4s)));
    }
    KVFERRY_TRY(client_->wait_ready(true, Deadline::after(3s)));
    return connect_steps();
  }

  /// A connection that still answers is kept: the worker holds a descriptor for a while for each
  /// one that was closed.
  Status connect_steps() {
    if (steps_ != nullptr) {
      const auto known = greet_steps();
      if (known || known.error().code == ipc::ErrorCode::kTimeout) return known;
    }
    ipc::ControlLink::Options options;
    options.registry_path = dir_.rank_socket("default", 0, "step");
    options.control_path = dir_.rank_socket("default", 0, "stepctl");
    options.kind = ipc::ProcessKind::kEngine;
    options.incarnation = ipc::IncarnationId::random();
    options.name = "matrix engine";
    steps_.reset();
    KVFERRY_ASSIGN(steps_, ipc::ControlLink::connect(options, Deadline::after(2s)));
    return greet_steps();
  }

  Status greet_steps() {
    KVFERRY_TRY(
        steps_->call<ipc::Empty>(ipc::MessageKind::kStepHello, ipc::Empty{}, Deadline::after(2s)));
    return ipc::ok();
  }

  Result<ipc::StepReply> run(ipc::Step step) {
    const auto& ranks = client_->state().ranks;
    if (ranks.empty()) return KVFERRY_ERROR(kNotReady, "no rank is known");
    step.session = ranks[0].session;
    step.epoch = ranks[0].epoch;
    return steps_->call<ipc::StepReply>(ipc::MessageKind::kStep, step, Deadline::after(3s));
  }

  static std::vector<ipc::SeededItem> blocks(std::uint32_t first, std::uint64_t seed) {
    std::vector<ipc::SeededItem> items;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      items.push_back({kMain, BlockId{first + i}, seed + i});
    }
    return items;
  }

  Status compute(std::uint32_t first, std::uint64_t seed) {
    ipc::Step step;
    step.fills = blocks(first, seed);
    KVFERRY_TRY(run(std::move(step)));
    return ipc::ok();
  }

  Status store() {
    KVFERRY_ASSIGN(const JobId job, submit_store());
    return wait(job);
  }

  /// Whatever becomes of the store, it is answered, and the cache can be made again.
  Status clear_under_a_store() {
    for (Digest& hash : hashes_) hash = Digest::hash(hash.bytes.data(), hash.bytes.size());
    KVFERRY_ASSIGN(const JobId job, submit_store());
    KVFERRY_TRY(clear());
    const std::array<JobId, 1> jobs{job};
    KVFERRY_TRY(client_->wait(jobs, Deadline::after(3s)));
    KVFERRY_TRY(client_->reinit(0, Deadline::after(4s)));
    return ipc::ok();
  }

  /// Whatever a step says of layers that it waited for holds, whatever becomes of the job. A job
  /// whose step fails is given up.
  Status run_beside(JobId job, ipc::Step step) {
    step.patience = 2s;
    const auto reply = run(std::move(step));
    if (reply) {
      count_wrong(*reply);
    } else {
      (void)client_->cancel(job);
    }
    KVFERRY_TRY(wait(job));
    return reply ? ipc::ok() : Status(reply.error());
  }

  Result<JobId> submit_store(std::optional<LayerTicket> layers = std::nullopt) {
    std::vector<worker::StoreTarget> targets;
    for (const Digest& hash : hashes_) targets.push_back({kMain, hash});
    KVFERRY_ASSIGN(const auto slots, client_->reserve_store(targets, Deadline::after(2s)));
    std::vector<worker::StoreItem> items;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      if (slots[i].outcome != worker::Reservation::kReserved) {
        return KVFERRY_ERROR(kNoHostMemory, "no room for block {}", i);
      }
      items.push_back({kMain, BlockId{kComputed + i}, slots[i].slot});
    }
    return client_->submit_store(items, layers);
  }

  Status load() {
    KVFERRY_ASSIGN(const JobId job, submit_load());
    return wait(job, kLoaded);
  }

  Result<JobId> submit_load(std::optional<LayerTicket> layers = std::nullopt) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      items.push_back({kMain, BlockId{kLoaded + i}, hashes_[i]});
    }
    return client_->submit_load(items, 1, layers);
  }

  Status swap() {
    std::vector<worker::SequenceItem> items;
    for (std::uint32_t i = 0; i < kBlocks; ++i) items.push_back({kMain, BlockId{kComputed + i}, i});
    KVFERRY_ASSIGN(const JobId out, client_->swap_out(number_, items));
    KVFERRY_TRY(wait(out));
    KVFERRY_TRY(compute(kComputed, kJunk));
    KVFERRY_ASSIGN(const JobId in, client_->swap_in(number_, items));
    KVFERRY_TRY(wait(in, kComputed));
    return client_->drop_sequence(number_, Deadline::after(2s));
  }

  Status clear() {
    KVFERRY_ASSIGN(const auto summary,
                   client_->clear(worker::HostPolicy::kKeep, Deadline::after(5s)));
    if (summary.quarantined) return KVFERRY_ERROR(kQuarantined, "{}", summary.detail);
    return ipc::ok();
  }

  /// The first block's error, if any. Blocks that were loaded are checked first, whatever became of
  /// the others.
  Status wait(JobId job, std::optional<std::uint32_t> loaded_to = std::nullopt) {
    const std::array<JobId, 1> jobs{job};
    KVFERRY_ASSIGN(const std::vector<Completion> done, client_->wait(jobs, Deadline::after(3s)));
    const Completion& completion = done.at(0);
    if (loaded_to) KVFERRY_TRY(verify(completion, *loaded_to));
    for (const std::uint8_t code : completion.results) {
      if (code != 0) {
        return ipc::Error{static_cast<ipc::ErrorCode>(code), completion.message};
      }
    }
    return ipc::ok();
  }

  Status verify(const Completion& completion, std::uint32_t first) {
    ipc::Step step;
    for (std::uint32_t i = 0; i < completion.results.size(); ++i) {
      if (completion.results[i] == 0) {
        step.verifies.push_back({kMain, BlockId{first + i}, seed() + i});
      }
    }
    if (step.verifies.empty()) return ipc::ok();
    KVFERRY_ASSIGN(const ipc::StepReply reply, run(std::move(step)));
    count_wrong(reply);
    return ipc::ok();
  }

  void count_wrong(const ipc::StepReply& reply) const {
    std::uint64_t wrong = 0;
    for (const std::uint64_t words : reply.mismatches) wrong += words;
    if (wrong != 0) say(fmt::format("corrupt {} {}", number_, wrong));
  }

  const ipc::RuntimeDir dir_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<ipc::ControlLink> steps_;
  std::uint64_t number_ = 0;
  std::vector<Digest> hashes_;
};

int serve(const std::string& dir, const std::string& instance, const std::string& geometry) {
  std::unique_ptr<Engine> engine;
  while (const auto line = hear()) {
    if (*line == "quit") return 0;
    const std::uint64_t number = std::stoull(line->substr(line->find(' ') + 1));
    Status status;
    if (engine == nullptr) {
      auto connected = Engine::connect(dir, instance, geometry);
      if (connected) {
        engine = *std::move(connected);
      } else {
        status = connected.error();
      }
    }
    if (status) {
      status = line->starts_with("rest")     ? engine->rest(number)
               : line->starts_with("layers") ? engine->rest_by_layers(number)
               : line->starts_with("fill")   ? engine->fill(number)
                                             : engine->round(number);
    }
    say(status ? fmt::format("round {} ok", number)
               : fmt::format("round {} failed: {}", number, status.error().to_string()));
  }
  return 0;
}

}  // namespace
}  // namespace kvferry::test

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return kvferry::test::serve(argv[1], argv[2], argv[3]);
}
