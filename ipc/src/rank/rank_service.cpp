// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/rank_service.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "rank/lifecycle_thread.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kConnectDeadline = std::chrono::seconds(1);
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLastRetry = std::chrono::milliseconds(500);
/// A predecessor that was killed may take this long to be gone.
constexpr auto kSuccession = std::chrono::seconds(3);
constexpr auto kFirstInit = std::chrono::seconds(60);
// Nothing tells when device memory comes back: it is asked for again.
constexpr auto kFirstInitRetry = std::chrono::milliseconds(250);

bool no_retry_can_mend(ErrorCode code) noexcept {
  return code == ErrorCode::kRoleConflict || code == ErrorCode::kGeometryMismatch ||
         code == ErrorCode::kVersionMismatch || code == ErrorCode::kInvalidArgument;
}

/// Memory that an earlier life's peers still pin comes back when they let go or end.
bool may_come_back(ErrorCode code) noexcept {
  return code == ErrorCode::kNoDeviceMemory || code == ErrorCode::kQuarantined;
}

Envelope reply_to(const Envelope& request) {
  Envelope reply;
  reply.kind = request.kind;
  reply.request = request.request;
  reply.is_reply = true;
  return reply;
}

LeaseOptions lease_options(const RankConfig& config, ProcessKind kind) {
  LeaseOptions options;
  options.identity.instance = config.instance;
  options.identity.engine = config.engine;
  options.identity.rank = config.rank;
  options.identity.ranks = config.geometry.ranks;
  options.identity.self = kind;
  options.identity.cache_owner = config.cache_owner;
  options.identity.handles = config.handles;
  options.identity.fingerprint = config.geometry.fingerprint(config.arena.order);
  options.identity.incarnation = config.incarnation;
  options.timeouts = config.timeouts;
  return options;
}

}  // namespace

namespace {

/// The arena's user, and the allocator beside it: emptied when the regions are gone and before
/// anybody is told, whoever asked for the clear. Counts, so that nobody empties it twice.
class EmptyingUser final : public ArenaUser {
 public:
  EmptyingUser(ArenaUser& user, std::function<void()> empty_allocator)
      : user_(user), empty_allocator_(std::move(empty_allocator)) {}

  Status on_mapped(SessionId session, Arena& arena, ArenaContents contents) override {
    return user_.on_mapped(session, arena, contents);
  }
  Status quiesce(Epoch epoch, Deadline deadline) override { return user_.quiesce(epoch, deadline); }
  void on_unmapped(Epoch epoch) override { user_.on_unmapped(epoch); }
  void on_freed(Epoch epoch) override {
    user_.on_freed(epoch);
    empty();
  }

  void empty() {
    if (empty_allocator_) empty_allocator_();
    ++times_;
  }
  [[nodiscard]] std::uint64_t times() const noexcept { return times_; }

 private:
  ArenaUser& user_;
  const std::function<void()> empty_allocator_;
  std::atomic<std::uint64_t> times_{0};
};

}  // namespace

class RankService::Impl {
 public:
  Impl(EventLoop& loop,
       const RankConfig& config,
       ProcessKind kind,
       Device& device,
       ArenaUser& user,
       Hooks hooks,
       ArenaSource* source)
      : loop_(loop),
        config_(config),
        kind_(kind),
        device_(device),
        order_(config.arena.order),
        hooks_(std::move(hooks)),
        user_(user, hooks_.empty_allocator) {
    auto dir = RuntimeDir::open(config.runtime_dir, config.instance);
    if (!dir) throw Exception(std::move(dir).error());
    dir_ = std::make_unique<RuntimeDir>(std::move(dir).value());
    start_lease(source);
    log_info("{} {}/{}: {} of the cache, handles {}, device {}", to_string(kind), config.engine,
             config.rank.value, owner_ ? "owner" : "attacher", to_string(config.handles),
             device.name());
    post([this] { try_connect(); });
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() {
    say_bye();
    lifecycle_.reset();  // a running clear ends within its deadline
    owner_.reset();
    attacher_.reset();
    alive_.reset();
  }

  Status send(const Envelope& envelope) {
    if (!link_) {
      return KVFERRY_ERROR(kNoManager, "instance {}: no manager is connected; message {} not sent",
                           config_.instance, static_cast<int>(envelope.kind));
    }
    return link_->send(envelope);
  }

  [[nodiscard]] LeaseView view() const { return owner_ ? owner_->view() : attacher_->view(); }
  [[nodiscard]] const IncarnationId& incarnation() const noexcept { return config_.incarnation; }

 private:
  void start_lease(ArenaSource* source) {
    const LeaseOptions options = lease_options(config_, kind_);
    auto changed = [this](const LeaseView& view) {
      // Lease thread: hand the picture over to the loop, where everything else
      // lives.
      if (hooks_.on_lease) hooks_.on_lease(view);
      post([this, view] { on_lease_changed(view); });
    };
    if (options.identity.is_owner()) {
      auto layout = plan_arena(config_.geometry, config_.arena);
      if (!layout) throw Exception(std::move(layout).error());
      owner_ = std::make_unique<LeaseOwner>(options, *dir_, device_, user_, changed, source);
      const Deadline deadline = Deadline::after(kFirstInit);
      auto epoch = owner_->init(*layout, deadline);
      if (!epoch && !(may_come_back(epoch.error().code) && fits_device(*layout))) {
        throw Exception(std::move(epoch).error());
      }
      if (!epoch) await_memory(std::move(*layout), deadline, epoch.error());
    } else {
      if (source != nullptr) {
        throw Exception(KVFERRY_ERROR(
            kInvalidArgument,
            "{} {}/{} has regions of an engine to register, but --cache-owner {} lets the other "
            "side allocate; use --cache-owner worker, or register no regions",
            to_string(kind_), config_.engine, config_.rank.value, to_string(config_.cache_owner)));
      }
      attacher_ = std::make_unique<LeaseAttacher>(options, *dir_, device_, config_.geometry, user_,
                                                  changed);
    }
  }

  // When everything else on it is gone.
  [[nodiscard]] bool fits_device(const ArenaLayout& layout) const {
    const auto memory = device_.memory_info();
    return memory && layout.total_bytes() <= memory->total_bytes;
  }

  // From the loop, so that signals and the manager are served meanwhile.
  void await_memory(ArenaLayout layout, Deadline deadline, const Error& why) {
    if (!memory_awaited_) {
      memory_awaited_ = MonotonicClock::now();
      log_warn("rank {}: the first epoch waits at most {} s for device memory: {}",
               config_.rank.value, kFirstInit.count(), why.to_string());
    }
    if (deadline.expired()) return end_fatally(why);
    init_timer_ = loop_.after(kFirstInitRetry, [this, layout = std::move(layout), deadline] {
      init_timer_ = 0;
      lifecycle_->post([this, layout, deadline] {
        if (owner_->view().epoch.value > 0) return;  // a re-init of the manager was first
        post([this, layout, deadline, epoch = owner_->init(layout, deadline)] {
          on_first_init(layout, deadline, epoch);
        });
      });
    });
  }

  void on_first_init(const ArenaLayout& layout, Deadline deadline, const Result<Epoch>& epoch) {
    if (!epoch && may_come_back(epoch.error().code)) {
      return await_memory(layout, deadline, epoch.error());
    }
    log_info("rank {}: the wait for device memory ended after {} ms: {}", config_.rank.value,
             std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() -
                                                                   *memory_awaited_)
                 .count(),
             epoch ? std::string("mapped") : epoch.error().to_string());
    if (!epoch) end_fatally(epoch.error());
  }

  // Posted work must not outlive this object: the loop may run it after the
  // destructor.
  void post(std::function<void()> work) {
    loop_.post([alive = std::weak_ptr<int>(alive_), work = std::move(work)] {
      if (alive.lock()) work();
    });
  }

  // ---- the manager: connect, lose, reconnect (loop thread) ----

  void schedule_connect() {
    connect_timer_ = loop_.after(retry_, [this] {
      connect_timer_ = 0;
      try_connect();
    });
    retry_ = std::min<std::chrono::milliseconds>(retry_ * 2, kLastRetry);
  }

  void try_connect() {
    if (link_ || fatal_) return;
    if (hooks_.may_connect && !hooks_.may_connect()) {
      schedule_connect();
      return;
    }
    auto link = connect_and_register();
    if (!link) {
      on_connect_failed(link.error());
      return;
    }
    link_ = std::move(link).value();
    retry_ = kFirstRetry;
    waiting_logged_ = false;
    occupied_since_.reset();
    log_info("manager of instance {} connected, session {}", config_.instance,
             link_->welcome().manager_session.hex());
    loop_.watch(link_->fd(), [this] { drain_link(); });
    if (hooks_.on_manager) hooks_.on_manager(link_->welcome(), link_->take_pool_fd());
    memory_.reset();
    send_state(view());
    drain_link();
  }

  Result<std::unique_ptr<ControlLink>> connect_and_register() {
    ControlLink::Options options;
    options.registry_path = dir_->registry_socket();
    options.control_path = dir_->control_socket();
    options.kind = kind_;
    options.incarnation = config_.incarnation;
    options.name = fmt::format("{} {}/{}", to_string(kind_), config_.engine, config_.rank.value);
    const Deadline deadline = Deadline::after(kConnectDeadline);
    KVFERRY_ASSIGN(auto link, ControlLink::connect(options, deadline));
    RankHello hello;
    hello.engine = config_.engine;
    hello.rank = config_.rank;
    hello.kind = kind_;
    hello.cache_owner = config_.cache_owner;
    hello.handles = config_.handles;
    hello.order = order_;
    hello.geometry = config_.geometry;
    hello.device = device_.spec().to_string();
    KVFERRY_TRY(link->call<Empty>(MessageKind::kRankHello, hello, deadline));
    return link;
  }

  void on_connect_failed(const Error& error) {
    if (no_retry_can_mend(error.code)) {
      log_error("the manager refuses this {}: {}", to_string(kind_), error.to_string());
      end_fatally(error);
      return;
    }
    if (error.code == ErrorCode::kAlreadyExists) {
      const TimePoint now = MonotonicClock::now();
      if (!occupied_since_) {
        occupied_since_ = now;
        log_warn("{}; waiting {} s at most for its end", error.to_string(), kSuccession.count());
        waiting_logged_ = true;
      } else if (now - *occupied_since_ > kSuccession) {
        log_error("this {} is one too many: {}", to_string(kind_), error.to_string());
        end_fatally(error);
        return;
      }
    } else {
      occupied_since_.reset();
    }
    if (!waiting_logged_) {
      log_info("waiting for the manager of instance {}: {}", config_.instance, error.to_string());
      waiting_logged_ = true;
    }
    schedule_connect();
  }

  void end_fatally(const Error& error) {
    if (fatal_) return;
    fatal_ = true;
    if (hooks_.on_fatal) hooks_.on_fatal(error);
  }

  void say_bye() {
    if (connect_timer_ != 0) loop_.cancel(connect_timer_);
    connect_timer_ = 0;
    if (init_timer_ != 0) loop_.cancel(init_timer_);
    init_timer_ = 0;
    if (!link_) return;
    Envelope bye;
    bye.kind = MessageKind::kBye;
    if (const Status sent = link_->send(bye); !sent) {
      log_debug("bye not sent: {}", sent.error().to_string());
    }
    loop_.unwatch(link_->fd());
    link_.reset();
  }

  void drain_link() {
    while (link_) {
      auto received = link_->try_receive();
      if (!received) {
        if (link_->server_lost()) break;
        log_warn("message from the manager dropped: {}", received.error().to_string());
        continue;
      }
      if (!received->has_value()) break;
      dispatch(std::move(**received));
    }
    if (link_ && link_->server_lost()) {
      log_warn("the manager of instance {} is gone; reconnecting", config_.instance);
      loop_.unwatch(link_->fd());
      link_.reset();
      if (hooks_.on_manager_lost) hooks_.on_manager_lost();
      retry_ = kFirstRetry;
      schedule_connect();
    }
  }

  void dispatch(Envelope envelope) {
    if (envelope.kind == MessageKind::kRankClear && !envelope.is_reply) {
      lifecycle_->post([this, request = std::move(envelope)] { run_clear(request); });
    } else if (envelope.kind == MessageKind::kRankReinit && !envelope.is_reply) {
      lifecycle_->post([this, request = std::move(envelope)] { run_reinit(request); });
    } else if (hooks_.on_message) {
      hooks_.on_message(std::move(envelope));
    }
  }

  // ---- the one clear and the one re-init (lifecycle thread) ----

  void run_clear(const Envelope& request) {
    auto clear = decode<RankClear>(request.body, "RankClear");
    if (!clear) {
      answer(request, std::move(clear).error());
      return;
    }
    const std::uint64_t emptied = user_.times();
    auto outcome = clear_epoch(*clear);
    // Also where no region went: a clear that could not free them, or found none, frees what it
    // can.
    if (user_.times() == emptied) user_.empty();
    if (!outcome) {
      answer(request, std::move(outcome).error());
      return;
    }
    RankClearReply reply;
    reply.kind = outcome->kind;
    reply.epoch = outcome->epoch;
    reply.detail = outcome->detail;
    reply.quarantined_bytes = outcome->quarantined_bytes;
    reply.free_before = outcome->before.free_bytes;
    reply.free_after = outcome->after.free_bytes;
    if (hooks_.empty_allocator) {
      // It gave back more than the epoch.
      if (const auto memory = device_.memory_info(); memory) {
        reply.free_after = memory->free_bytes;
        post([this, shown = *memory] { memory_ = shown; });
      }
    }
    reply.took = outcome->took;
    answer(request, encode(reply));
  }

  Result<ClearOutcome> clear_epoch(const RankClear& clear) {
    const LeaseView now = view();
    if (clear.session != now.session) {
      return KVFERRY_ERROR(kStaleEpoch, "rank {}: clear names session {}, current is {}",
                           config_.rank.value, clear.session.hex(), now.session.hex());
    }
    const Deadline deadline = Deadline::after(clear.deadline);
    return owner_ ? owner_->clear(clear.epoch, deadline) : attacher_->detach(clear.epoch, deadline);
  }

  void run_reinit(const Envelope& request) {
    auto reinit = decode<RankReinit>(request.body, "RankReinit");
    if (!reinit) {
      answer(request, std::move(reinit).error());
      return;
    }
    const TimePoint start = MonotonicClock::now();
    auto epoch = reinit_epoch(*reinit);
    if (!epoch) {
      answer(request, std::move(epoch).error());
      return;
    }
    RankReinitReply reply;
    reply.session = view().session;
    reply.epoch = *epoch;
    reply.took =
        std::chrono::duration_cast<std::chrono::microseconds>(MonotonicClock::now() - start);
    answer(request, encode(reply));
  }

  Result<Epoch> reinit_epoch(const RankReinit& reinit) {
    const Deadline deadline = Deadline::after(reinit.deadline);
    if (attacher_) {
      KVFERRY_TRY(attacher_->wait_mapped(reinit.epoch, deadline));
      return attacher_->view().epoch;
    }
    ArenaOptions options = config_.arena;
    if (reinit.gpu_blocks != 0) options.gpu_blocks = reinit.gpu_blocks;
    KVFERRY_ASSIGN(const ArenaLayout layout, plan_arena(config_.geometry, options));
    KVFERRY_ASSIGN(const Epoch epoch, owner_->init(layout, deadline));
    config_.arena = options;
    return epoch;
  }

  void answer(const Envelope& request, Bytes body) {
    Envelope reply = reply_to(request);
    reply.body = std::move(body);
    post_reply(std::move(reply));
  }

  void answer(const Envelope& request, Error error) {
    log_warn("command {} refused: {}", static_cast<int>(request.kind), error.to_string());
    Envelope reply = reply_to(request);
    reply.error = std::move(error);
    post_reply(std::move(reply));
  }

  void post_reply(Envelope reply) {
    post([this, reply = std::move(reply)] {
      send_state(view());  // first, so that the manager never knows less than
                           // the reply says
      send_logged(reply);
    });
  }

  // ---- state reports (loop thread) ----

  void send_logged(const Envelope& envelope) {
    if (const Status sent = send(envelope); !sent) {
      log_warn("message to the manager not sent: {}", sent.error().to_string());
    }
  }

  void on_lease_changed(const LeaseView& view) {
    if (view.refused && no_retry_can_mend(view.refused->code)) {
      end_fatally(*view.refused);
      return;
    }
    send_state(view);
  }

  void send_state(const LeaseView& view) {
    if (!link_) return;
    RankState state;
    state.session = view.session;
    state.epoch = view.epoch;
    state.phase = view.phase;
    state.mapped = view.mapped;
    state.prepared_by = view.prepared_by;
    state.group_blocks = view.group_blocks;
    state.lease_holders = view.lease_holders;
    state.quarantined_bytes = view.quarantined_bytes;
    state.note = view.note;
    look_at_memory(view);
    if (memory_) {
      state.device_free_bytes = memory_->free_bytes;
      state.device_total_bytes = memory_->total_bytes;
    }
    Envelope envelope;
    envelope.kind = MessageKind::kRankState;
    envelope.body = encode(state);
    send_logged(envelope);
  }

  // Ours changes with the phase and with what quarantine gives back; a view changes more often than
  // that, and a look is not free: on the host backend it waits for a grace period of the kernel.
  void look_at_memory(const LeaseView& view) {
    if (memory_ && memory_phase_ == view.phase && memory_epoch_ == view.epoch &&
        memory_quarantined_ == view.quarantined_bytes) {
      return;
    }
    const auto memory = device_.memory_info();
    if (!memory) return;
    memory_ = *memory;
    memory_phase_ = view.phase;
    memory_epoch_ = view.epoch;
    memory_quarantined_ = view.quarantined_bytes;
  }

  EventLoop& loop_;
  RankConfig config_;  ///< arena: read and written by the lifecycle thread only, once constructed.
  ProcessKind kind_;
  Device& device_;
  const ArenaOrder order_;  ///< Of every epoch: what config_.arena says is the lifecycle thread's.
  Hooks hooks_;
  EmptyingUser user_;
  std::unique_ptr<RuntimeDir> dir_;
  std::optional<MemoryInfo> memory_;  ///< As last told to the manager, in the state below.
  LeasePhase memory_phase_ = LeasePhase::kVacant;
  Epoch memory_epoch_;
  std::uint64_t memory_quarantined_ = 0;
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
  std::unique_ptr<ControlLink> link_;
  TimerId connect_timer_ = 0;
  TimerId init_timer_ = 0;
  std::optional<TimePoint> memory_awaited_;  ///< Since when the first epoch waits.
  std::chrono::milliseconds retry_ = kFirstRetry;
  bool waiting_logged_ = false;
  std::optional<TimePoint> occupied_since_;  ///< The manager says that the rank has another one.
  bool fatal_ = false;
  // Exactly one of the two, by role.
  std::unique_ptr<LeaseOwner> owner_;
  std::unique_ptr<LeaseAttacher> attacher_;
  std::unique_ptr<LifecycleThread> lifecycle_ = std::make_unique<LifecycleThread>();
};

RankService::RankService(EventLoop& loop,
                         const RankConfig& config,
                         ProcessKind kind,
                         Device& device,
                         ArenaUser& user,
                         Hooks hooks,
                         ArenaSource* source)
    : impl_(std::make_unique<Impl>(loop, config, kind, device, user, std::move(hooks), source)) {}

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
