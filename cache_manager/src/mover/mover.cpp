// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/mover.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/cache_file.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/rank/pool_keeper.hpp"
#include "kvferry/ipc/rank/rank_service.hpp"
#include "mover/kept_sums.hpp"
#include "mover/transfer_engine.hpp"

#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Envelope;
using ipc::MessageKind;

constexpr auto kResendDelay = std::chrono::milliseconds(1);
// A few blocks through both processes, on a link that others use.
constexpr auto kAwakeTime = std::chrono::microseconds(300);

/// Wires engine, lease and manager link together on one loop.
class MoverProcess {
 public:
  explicit MoverProcess(const MoverConfig& config)
      : dir_(value_or_throw(ipc::RuntimeDir::open(config.rank.runtime_dir, config.rank.instance))),
        keep_name_(
            dir_.rank_socket(config.rank.engine, config.rank.rank.value, ipc::PoolKeeper::kSocket)),
        keep_pool_(config.keep_pool),
        numa_nodes_(config.numa_nodes),
        transitions_(ipc::open_transitions(config.rank, ipc::ProcessKind::kMover, dir_)),
        device_(ipc::open_device(config.rank.device)),
        engine_(
            *device_,
            engine_options(config,
                           dir_,
                           transitions_,
                           [this](ipc::MoverSums s, std::vector<ipc::KeptSum> kept) {
                             summed(std::move(s), std::move(kept));
                           }),
            [this](ipc::MoverJobDone d) { done(std::move(d)); },
            [this](const ipc::Error& e) { device_failed(e); }) {
    ipc::RankService::Hooks hooks;
    hooks.on_message = [this](Envelope envelope) { on_message(envelope); };
    hooks.on_manager = [this](const ipc::RegistryWelcome&, ipc::PoolMemory memory) {
      on_manager(std::move(memory));
    };
    hooks.on_manager_lost = [this] { on_manager_lost(); };
    hooks.may_connect = [this] { return engine_.idle(); };
    hooks.on_fatal = [this](const ipc::Error& error) { end(error); };
    loop_.watch(signals_.fd(), [this] {
      const int number = signals_.take();
      if (number == 0) return;
      ipc::log_info("signal {}: the mover ends", number);
      loop_.stop();
    });
    service_ =
        std::make_unique<ipc::RankService>(loop_, config.rank, ipc::ProcessKind::kMover, *device_,
                                           transitions_, engine_, std::move(hooks));
  }

  void run() {
    loop_.run();
    service_.reset();  // lets go of the arena while the engine still serves quiesce
    if (fatal_) throw ipc::Exception(*fatal_);
  }

 private:
  static std::optional<Calibrator::Options> calibrator_options(const MoverConfig& config) {
    const bool gpu = config.rank.device.kind == ipc::DeviceKind::kCuda;
    if (config.calibration == CalibrationMode::kOff ||
        (config.calibration == CalibrationMode::kGpus && !gpu)) {
      return std::nullopt;
    }
    std::filesystem::path cache_dir = config.cache_dir;
    if (cache_dir.empty()) cache_dir = ipc::default_cache_dir();
    return Calibrator::Options{config.rank.geometry, std::move(cache_dir)};
  }

  static TransferEngine::Options engine_options(const MoverConfig& config,
                                                const ipc::RuntimeDir& dir,
                                                const ipc::TransitionLog& transitions,
                                                PoolChecks::Summed on_sums) {
    TransferEngine::Options options;
    options.strategy = config.strategy;
    options.calibration = calibrator_options(config);
    options.store_bytes_per_second = config.rank.store_rate;
    options.load_bytes_per_second = config.rank.load_rate;
    options.agent_swap_bytes = config.agent_swap_bytes;
    options.gathered_percent = config.gathered_percent;
    options.urgent_loads = config.urgent_loads;
    options.on_sums = std::move(on_sums);
    options.transitions = transitions;
    options.staging.transitions = transitions;
    options.staging.agent_path =
        dir.rank_socket(config.rank.engine, config.rank.rank.value, "agent");
    options.staging.engine = config.rank.engine;
    options.staging.rank = config.rank.rank;
    options.staging.mover = config.rank.incarnation;
    return options;
  }

  void on_manager(ipc::PoolMemory memory) {
    loop_.cancel(std::exchange(keep_timer_, 0));
    manager_ends_ = false;
    // What is registered already stays so.
    if (pool_ == nullptr || !ipc::is_same_memory(pool_->descriptor(), memory.pool)) {
      auto mapped = map_pool(memory);
      if (!mapped) {
        end(mapped.error());
        return;
      }
      pool_ = std::move(mapped).value();
      kept_sums_.forget();
    }
    keep(std::move(memory));
    engine_.set_pool(pool_);
    connected_ = true;
    calm_sums();
  }

  /// Nobody waits for the next ones.
  void calm_sums() {
    if (kept_sums_.has_all(engine_.sums_queued())) engine_.sum_at_once(false);
  }

  ipc::Result<std::shared_ptr<ipc::PoolMapping>> map_pool(const ipc::PoolMemory& memory) {
    KVFERRY_ASSIGN(ipc::PoolMemory own, memory.duplicate());
    return ipc::PoolMapping::map(*device_, std::move(own.pool), memory.pool_bytes, &background_,
                                 numa_nodes_.value_or(device_->numa_nodes()));
  }

  // Only now: a predecessor of the rank is gone when the manager takes this one.
  void keep(ipc::PoolMemory memory) {
    if (keeper_ != nullptr) keeper_->drop();
    if (!memory.catalogue.valid() || keep_pool_.count() == 0) return;
    try {
      if (keeper_ == nullptr) {
        keeper_ = std::make_unique<ipc::PoolKeeper>(loop_, keep_name_, [this] { forget_pool(); });
      }
      keeper_->keep(std::move(memory));
    } catch (const ipc::Exception& exception) {
      ipc::log_warn("what is in the host pool is lost when its manager is killed: {}",
                    exception.error().to_string());
    }
  }

  void on_manager_lost() {
    connected_ = false;
    unsent_.clear();
    unsent_kept_.reset();
    kept_sums_.stop_telling();
    engine_.drop_pool();
    if (manager_ends_ || keeper_ == nullptr || pool_ == nullptr) return let_pool_go();
    keeper_->offer();
    engine_.sum_at_once(true);  // the next manager drops what has no checksums
    ipc::log_info("keeping the host pool of {} for {} ms for the next manager",
                  ipc::format_size(pool_->size_bytes()), keep_pool_.count());
    keep_timer_ = loop_.after(keep_pool_, [this] {
      keep_timer_ = 0;
      ipc::log_warn("no manager has come for {} ms: the host pool is let go", keep_pool_.count());
      let_pool_go();
    });
  }

  void let_pool_go() {
    if (keeper_ != nullptr) keeper_->drop();
    forget_pool();
  }

  void forget_pool() {
    pool_.reset();
    engine_.sum_at_once(false);
    kept_sums_.forget();
  }

  void on_message(const Envelope& envelope) {
    if (envelope.kind == MessageKind::kMoverJob) {
      auto job = ipc::decode<ipc::MoverJob>(envelope.body, "MoverJob");
      if (job) {
        if (job->brief) loop_.stay_awake(kAwakeTime);
        engine_.submit(std::move(job).value());
      } else {
        // Whose job it was cannot be told, so it cannot be answered; our death answers it.
        end(job.error());
      }
    } else if (envelope.kind == MessageKind::kMoverCancel) {
      if (const auto cancel = ipc::decode<ipc::MoverCancel>(envelope.body, "MoverCancel"); cancel) {
        engine_.cancel(cancel->job);
      }
    } else if (envelope.kind == MessageKind::kTellSums) {
      if (!kept_sums_.has_all(engine_.sums_queued())) engine_.sum_at_once(true);
      kept_sums_.tell(engine_.sums_queued());
      send_unsent();
    } else if (envelope.kind == MessageKind::kBye) {
      manager_ends_ = true;
    } else {
      ipc::log_warn("message of kind {} is not for a mover, dropped",
                    static_cast<int>(envelope.kind));
    }
  }

  // Lane threads.
  void done(ipc::MoverJobDone result) {
    loop_.post([this, result = std::move(result)]() mutable {
      if (!connected_) return;  // of a lost manager: nobody knows the job any more
      unsent_.push_back(std::move(result));
      send_unsent();
    });
  }

  // A thread of the checks. Nobody misses sums that were not sent, as long as their manager lives.
  void summed(ipc::MoverSums sums, std::vector<ipc::KeptSum> kept) {
    loop_.post([this, sums = std::move(sums), kept = std::move(kept)] {
      kept_sums_.add(pool_ == nullptr ? std::vector<ipc::KeptSum>() : kept);
      if (!connected_) return;
      calm_sums();
      if (const ipc::Status sent =
              kept.empty() ? ipc::ok() : service_->notify(MessageKind::kMoverSums, sums);
          !sent) {
        ipc::log_debug("checksums not sent: {}", sent.error().to_string());
      }
      send_unsent();
    });
  }

  void device_failed(const ipc::Error& error) {
    loop_.post([this, error] { end(error); });
  }

  void send_unsent() {
    while (!unsent_.empty()) {
      if (!send_or_retry(MessageKind::kMoverJobDone, unsent_.front(), "completion")) return;
      unsent_.pop_front();
    }
    for (;;) {
      if (!unsent_kept_) unsent_kept_ = kept_sums_.next();
      if (!unsent_kept_) return;
      if (!send_or_retry(MessageKind::kKeptSums, *unsent_kept_, "checksums")) return;
      unsent_kept_.reset();
    }
  }

  /// False: later, from a timer.
  template <typename T> bool send_or_retry(MessageKind kind, const T& body, const char* what) {
    const ipc::Status sent = service_->notify(kind, body);
    if (!sent && sent.error().code == ipc::ErrorCode::kBusy) {
      if (resend_timer_ == 0) {
        resend_timer_ = loop_.after(kResendDelay, [this] {
          resend_timer_ = 0;
          send_unsent();
        });
      }
      return false;
    }
    if (!sent) ipc::log_warn("{} not sent: {}", what, sent.error().to_string());
    return true;
  }

  void end(const ipc::Error& error) {
    ipc::log_error("ending: {}", error.to_string());
    if (!fatal_) fatal_ = error;
    loop_.stop();
  }

  ipc::SignalFd signals_;  // first: blocks the signals in all threads
  ipc::EventLoop loop_;
  ipc::RuntimeDir dir_;
  const std::filesystem::path keep_name_;
  const std::chrono::milliseconds keep_pool_;
  const std::optional<std::vector<int>> numa_nodes_;  ///< As configured.
  ipc::TransitionLog transitions_;
  std::unique_ptr<ipc::Device> device_;
  ipc::Background background_{"kvf-pool"};  ///< Registers the pool and gives it back.
  std::shared_ptr<ipc::PoolMapping> pool_;  ///< Of the manager, or of one that was killed.
  std::unique_ptr<ipc::PoolKeeper> keeper_;
  ipc::TimerId keep_timer_ = 0;
  bool manager_ends_ = false;  ///< It said so: nobody comes after it.
  bool connected_ = false;
  std::deque<ipc::MoverJobDone> unsent_;
  KeptSums kept_sums_;
  std::optional<ipc::KeptSums> unsent_kept_;
  ipc::TimerId resend_timer_ = 0;  ///< One, however many completions wait.
  std::optional<ipc::Error> fatal_;
  TransferEngine engine_;
  std::unique_ptr<ipc::RankService> service_;  // last: uses all above
};

}  // namespace

void run_mover(const MoverConfig& config) { MoverProcess(config).run(); }

}  // namespace kvferry::cache_manager
