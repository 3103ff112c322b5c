// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/rank_service.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "rank/component_commands.hpp"
#include "rank/empty_command.hpp"
#include "rank/emptying_user.hpp"
#include "rank/first_epoch.hpp"
#include "rank/lifecycle_commands.hpp"
#include "rank/lifecycle_thread.hpp"
#include "rank/loop_calls.hpp"
#include "rank/manager_connection.hpp"
#include "rank/memory_commands.hpp"
#include "rank/rank_lease.hpp"
#include "rank/refusal.hpp"
#include "rank/reply_to.hpp"
#include "rank/state_report.hpp"
#include "rank/weights_commands.hpp"

#include <memory>
#include <utility>

namespace kvferry::ipc {

TransitionLog open_transitions(const RankConfig& config, ProcessKind kind, const RuntimeDir& dir) {
  return TransitionLog::create_or_warn(dir, {.role = std::string(to_string(kind)),
                                             .engine = config.engine,
                                             .rank = config.rank,
                                             .incarnation = config.incarnation});
}

class RankService::Impl {
 public:
  Impl(EventLoop& loop,
       const RankConfig& config,
       ProcessKind kind,
       Device& device,
       TransitionLog transitions,
       ArenaUser& user,
       Hooks hooks,
       ArenaSource* source)
      : config_(config),
        hooks_(std::move(hooks)),
        user_(user, hooks_.empty_allocator),
        dir_(value_or_throw(RuntimeDir::open(config.runtime_dir, config.instance))),
        calls_(loop),
        report_(device),
        connection_(loop, {config_, kind, device, transitions}, dir_, connection_hooks()),
        lease_({config_, kind, device, std::move(transitions)},
               dir_,
               user_,
               source,
               [this](const LeaseView& view) { on_lease(view); }),
        commands_(lease_, user_, device),
        weights_(hooks_.weights, hooks_.weights_id, dir_, config_.rank),
        empty_(user_, device),
        memory_(hooks_.memory, user_, weights_, device),
        components_(hooks_.components),
        first_epoch_(
            calls_, *lifecycle_, lease_, [this](const Error& error) { end_fatally(error); }) {
    if (lease_.is_owner()) first_epoch_.start();
    log_info("{} {}/{}: {} of the cache, handles {}, device {}", to_string(kind), config.engine,
             config.rank.value, lease_.is_owner() ? "owner" : "attacher", to_string(config.handles),
             device.name());
    calls_.post([this] { connection_.start(); });
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    connection_.close();
    lease_.cancel_waits();
    weights_.cancel();
    upkeep_.reset();
    lifecycle_.reset();  // a running clear ends within its deadlines
  }

  Status send(const Envelope& envelope) { return connection_.send(envelope); }

  [[nodiscard]] LeaseView view() const { return lease_.view(); }
  [[nodiscard]] const IncarnationId& incarnation() const noexcept { return config_.incarnation; }

 private:
  // Lease thread: hand the picture over to the loop, where everything else lives.
  void on_lease(const LeaseView& view) {
    if (hooks_.on_lease) hooks_.on_lease(view);
    calls_.post([this, view] { on_lease_changed(view); });
  }

  void on_lease_changed(const LeaseView& view) {
    if (view.refused && no_retry_can_mend(view.refused->code)) {
      end_fatally(*view.refused);
      return;
    }
    send_state(view);
  }

  ManagerConnection::Hooks connection_hooks() {
    ManagerConnection::Hooks hooks;
    hooks.may_connect = hooks_.may_connect;
    hooks.on_connected = [this](const RegistryWelcome& welcome, PoolMemory pool) {
      if (hooks_.on_manager) hooks_.on_manager(welcome, std::move(pool));
      report_.forget_memory();
      told_ = 0;
      send_state(view());
    };
    hooks.on_lost = [this] {
      weights_.cancel();
      upkeep_->post([this] { weights_.abandon(); });
      if (hooks_.on_manager_lost) hooks_.on_manager_lost();
    };
    hooks.on_message = [this](Envelope envelope) { dispatch(std::move(envelope)); };
    hooks.on_refused = [this](const Error& error) { end_fatally(error); };
    return hooks;
  }

  void dispatch(Envelope envelope) {
    if (LifecycleCommands::is_command(envelope)) {
      lifecycle_->post([this, request = std::move(envelope)] {
        calls_.post([this, answer = commands_.run(request)] { send_answer(answer); });
      });
    } else if (WeightsCommands::is_command(envelope)) {
      weights_.interrupt(envelope);
      upkeep_->post([this, request = std::move(envelope)] {
        calls_.post([this, answer = weights_.run(request)] { send_answer({answer, {}}); });
      });
    } else if (EmptyCommand::is_command(envelope)) {
      upkeep_->post([this, request = std::move(envelope)] {
        calls_.post([this, answer = empty_.run(request)] { send_answer(answer); });
      });
    } else if (MemoryCommands::is_command(envelope)) {
      upkeep_->post([this, request = std::move(envelope)] {
        calls_.post([this, answer = memory_.run(request)] { send_answer(answer); });
      });
    } else if (ComponentCommands::is_command(envelope)) {
      on_components(std::move(envelope));
    } else if (hooks_.on_message) {
      hooks_.on_message(std::move(envelope));
    }
  }

  /// A look waits for nothing: it is not to wait for an update that reads from a disk, either.
  void on_components(Envelope request) {
    const TimePoint received = MonotonicClock::now();
    if (ComponentCommands::only_looks(request)) {
      send_logged(components_.run(request, received));
      return;
    }
    upkeep_->post([this, received, request = std::move(request)] {
      calls_.post([this, answer = components_.run(request, received)] {
        send_answer({answer, {}});
      });
    });
  }

  void send_answer(const LifecycleCommands::Answer& answer) {
    if (answer.memory) report_.set_memory(*answer.memory);
    send_state(view());  // first, so that the manager never knows less than the reply says
    send_logged(answer.reply);
  }

  // What a reply or a greeting has told may be later than what is on its way here from the lease: a
  // manager that heard the earlier one after it would take a mapped rank for one that is not, for a
  // moment, and fail its engine's jobs.
  void send_state(const LeaseView& view) {
    if (!connection_.is_connected() || view.number < told_) return;
    told_ = view.number;
    Envelope envelope;
    envelope.kind = MessageKind::kRankState;
    envelope.body = encode(report_.make(view, weights_.id(), memory_.released(), weights_.lost()));
    send_logged(envelope);
  }

  void send_logged(const Envelope& envelope) {
    if (const Status sent = send(envelope); !sent) {
      log_warn("message to the manager not sent: {}", sent.error().to_string());
    }
  }

  void end_fatally(const Error& error) {
    if (fatal_) return;
    fatal_ = true;
    connection_.give_up();
    if (hooks_.on_fatal) hooks_.on_fatal(error);
  }

  const RankConfig config_;
  Hooks hooks_;
  EmptyingUser user_;
  const RuntimeDir dir_;
  LoopCalls calls_;
  StateReport report_;
  bool fatal_ = false;
  ManagerConnection connection_;
  std::unique_ptr<LifecycleThread> lifecycle_ = std::make_unique<LifecycleThread>("kvf-lifecycle");
  /// Apart from clears, which nothing may keep waiting: neither a disk nor a device that hangs.
  std::unique_ptr<LifecycleThread> upkeep_ = std::make_unique<LifecycleThread>("kvf-upkeep");
  RankLease lease_;
  std::uint64_t told_ = 0;  ///< The view that the manager was told last.
  LifecycleCommands commands_;
  WeightsCommands weights_;
  EmptyCommand empty_;
  MemoryCommands memory_;
  ComponentCommands components_;
  FirstEpoch first_epoch_;
};

RankService::RankService(EventLoop& loop,
                         const RankConfig& config,
                         ProcessKind kind,
                         Device& device,
                         TransitionLog transitions,
                         ArenaUser& user,
                         Hooks hooks,
                         ArenaSource* source)
    : impl_(std::make_unique<Impl>(
          loop, config, kind, device, std::move(transitions), user, std::move(hooks), source)) {}

RankService::~RankService() = default;

Status RankService::send(const Envelope& envelope) { return impl_->send(envelope); }

Status RankService::reply_error(const Envelope& request, Error error) {
  Envelope envelope = reply_to(request);
  envelope.error = std::move(error);
  return send(envelope);
}

const IncarnationId& RankService::incarnation() const noexcept { return impl_->incarnation(); }

LeaseView RankService::view() const { return impl_->view(); }

}  // namespace kvferry::ipc
