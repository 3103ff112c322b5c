// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/registration.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/rank_service.hpp"
#include "service_thread.hpp"
#include "staging_agent.hpp"
#include "worker_arena.hpp"

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace kvferry::worker {

using ipc::Envelope;
using ipc::Error;
using ipc::MessageKind;

namespace {

using Agent = ServiceThread<StagingAgent>;

/// What outlives the link: the way to its thread, and the last state.
struct Mailbox {
  std::mutex mutex;                ///< Guards both.
  ipc::EventLoop* loop = nullptr;  ///< Null before the link stands and after it ended.
  ipc::LeaseView view;

  /// Runs the call on the link's thread; dropped when the link is gone.
  void post(std::function<void()> call) {
    const std::lock_guard lock(mutex);
    if (loop != nullptr) loop->post(std::move(call));
  }
};

/// The lease and the link to the manager, on the thread of their loop.
class RankLink {
 public:
  RankLink(ipc::EventLoop& loop,
           const ipc::RankConfig& config,
           ipc::Device& device,
           const ipc::TransitionLog& transitions,
           WorkerArena& arena,
           ipc::ArenaSource* regions,
           LayerWords& layers,
           Agent& agent,
           std::shared_ptr<Mailbox> mailbox,
           const WorkerHooks& hooks)
      : layers_(layers),
        agent_(agent),
        mailbox_(std::move(mailbox)),
        service_(loop,
                 config,
                 ipc::ProcessKind::kWorker,
                 device,
                 transitions,
                 arena,
                 rank_hooks(hooks),
                 regions) {
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->loop = &loop;
  }
  RankLink(const RankLink&) = delete;
  RankLink& operator=(const RankLink&) = delete;
  ~RankLink() {
    const std::lock_guard lock(mailbox_->mutex);
    mailbox_->loop = nullptr;
  }

 private:
  ipc::RankService::Hooks rank_hooks(const WorkerHooks& worker) {
    layers_.fail_awaited(KVFERRY_ERROR(kNotReady, "no manager has accepted this worker yet"));
    ipc::RankService::Hooks hooks;
    hooks.on_message = [this](Envelope envelope) { on_message(std::move(envelope)); };
    hooks.on_manager = [this](const ipc::RegistryWelcome& welcome, const ipc::PoolMemory&) {
      ipc::log_info("manager {} accepted this worker", welcome.manager_session.hex());
      layers_.serve_awaited();
    };
    hooks.on_manager_lost = [this] {
      ipc::log_warn("the manager is gone; serving steps without offload until one is back");
      // Its movers give its jobs up, and its engines' jobs end without it.
      layers_.fail_awaited(
          KVFERRY_ERROR(kPeerDied, "the manager ended, and its transfers with it"));
    };
    hooks.on_lease = [mailbox = mailbox_](const ipc::LeaseView& view) {
      const std::lock_guard lock(mailbox->mutex);
      mailbox->view = view;
    };
    hooks.empty_allocator = worker.empty_allocator;
    hooks.weights = worker.weights;
    const bool unnamed = worker.weights != nullptr && worker.weights_id.is_zero();
    hooks.weights_id = unnamed ? ipc::Digest::random() : worker.weights_id;
    hooks.memory = worker.memory;
    hooks.components = worker.components;
    hooks.on_fatal = worker.on_fatal;
    return hooks;
  }

  void on_message(Envelope envelope) {
    if (envelope.is_reply) return;
    if (envelope.kind == MessageKind::kLayersFailed) return on_layers_failed(envelope);
    if (envelope.kind != MessageKind::kQuiesceStaging) {
      ipc::log_warn("manager sent message kind {}, which is not for a worker",
                    static_cast<unsigned>(envelope.kind));
      if (envelope.request.value != 0) {
        answer(envelope, KVFERRY_ERROR(kProtocol, "message kind {} is not for a worker",
                                       static_cast<unsigned>(envelope.kind)));
      }
      return;
    }
    auto quiesce = ipc::decode<ipc::QuiesceStaging>(envelope.body, "QuiesceStaging");
    envelope.body.clear();
    if (!quiesce) {
      answer(envelope, std::move(quiesce).error());
      return;
    }
    const ipc::Deadline deadline = ipc::Deadline::after(quiesce->deadline);
    agent_.post([this, request = *quiesce, deadline, mailbox = mailbox_,
                 envelope = std::move(envelope)](StagingAgent& agent) {
      agent.quiesce(request, deadline, [this, mailbox, envelope](const ipc::Status& status) {
        mailbox->post([this, envelope, status] { answer(envelope, status); });
      });
    });
  }

  void on_layers_failed(const Envelope& envelope) {
    const auto failed = ipc::decode<ipc::LayersFailed>(envelope.body, "LayersFailed");
    if (failed) {
      layers_.fail(failed->ticket, failed->error);
    } else {
      ipc::log_warn("message of the manager ignored: {}", failed.error().to_string());
    }
  }

  void answer(const Envelope& request, const ipc::Status& status) {
    const ipc::Status sent = status ? service_.reply(request, ipc::Empty{})
                                    : service_.reply_error(request, status.error());
    if (!sent) ipc::log_warn("no answer to the manager: {}", sent.error().to_string());
  }

  LayerWords& layers_;
  Agent& agent_;
  const std::shared_ptr<Mailbox> mailbox_;
  ipc::RankService service_;
};

}  // namespace

/// Members are declared so that users end before what they use: the link first (it ends the arena,
/// while engine and agent still finish what is in flight), the agent's thread next, then the arena.
class RegisteredWorker::Impl {
 public:
  Impl(ipc::Device& device,
       const ipc::RankConfig& config,
       ipc::ArenaSource* regions,
       WorkerHooks hooks)
      : device_(device),
        config_(config),
        regions_(regions),
        hooks_(std::move(hooks)),
        dir_(value_or_throw(ipc::RuntimeDir::open(config.runtime_dir, config.instance))),
        transitions_(ipc::open_transitions(config, ipc::ProcessKind::kWorker, dir_)),
        arena_(device, config.rank),
        layers_(device),
        agent_(
            "kvf-agent",
            [this](ipc::EventLoop& loop) {
              return std::make_unique<StagingAgent>(loop, dir_, config_, device_, arena_, layers_,
                                                    activity_, hooks_.copies, transitions_,
                                                    [this](const Error& error) { fail(error); });
            },
            [this] { fail(KVFERRY_ERROR(kCancelled, "the agent's thread ended; see the log")); }) {
    layers_.on_sooner([this] { agent_.post([](StagingAgent& agent) { agent.look_at_layers(); }); });
    arena_.add_revoke_listener([this] {
      if (hooks_.on_revoked) hooks_.on_revoked();
      agent_.post([](StagingAgent& agent) { agent.on_revoked(); });
    });
  }

  void start() {
    link_.emplace(
        "kvf-rank",
        [this](ipc::EventLoop& loop) {
          return std::make_unique<RankLink>(loop, config_, device_, transitions_, arena_, regions_,
                                            layers_, agent_, mailbox_, hooks_);
        },
        [this] { fail(KVFERRY_ERROR(kCancelled, "the lease's thread ended; see the log")); });
    ipc::log_info("worker {}/{} of instance {} on {} ({}): cache owner {}, {} handles, {} memory",
                  config_.engine, config_.rank.value, config_.instance, device_.name(),
                  device_.spec().to_string(), ipc::to_string(config_.cache_owner),
                  ipc::to_string(config_.handles),
                  regions_ == nullptr ? "kvferry's" : "the engine's");
  }

  ipc::Result<ArenaUse> enter() { return arena_.enter(); }
  ipc::Result<ArenaUse> enter(const ipc::SessionId& session, ipc::Epoch epoch) {
    return arena_.enter(session, epoch);
  }
  [[nodiscard]] ipc::LeaseView view() const {
    const std::lock_guard lock(mailbox_->mutex);
    return mailbox_->view;
  }
  [[nodiscard]] LayerWords& layers() noexcept { return layers_; }
  [[nodiscard]] ipc::ComputeActivity& activity() noexcept { return activity_; }
  void close() { link_.reset(); }

 private:
  void fail(const Error& error) {
    if (hooks_.on_fatal) hooks_.on_fatal(error);
  }

  ipc::Device& device_;
  const ipc::RankConfig config_;
  ipc::ArenaSource* const regions_;
  const WorkerHooks hooks_;
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>();
  ipc::RuntimeDir dir_;
  ipc::TransitionLog transitions_;
  WorkerArena arena_;
  LayerWords layers_;
  ipc::ComputeActivity activity_;
  Agent agent_;
  std::optional<ServiceThread<RankLink>> link_;
};

RegisteredWorker::RegisteredWorker(ipc::Device& device,
                                   const ipc::RankConfig& identity,
                                   ipc::ArenaSource* regions,
                                   WorkerHooks hooks)
    : impl_(std::make_unique<Impl>(device, identity, regions, std::move(hooks))) {}

RegisteredWorker::~RegisteredWorker() { ipc::forget_in_child(home_, impl_); }

void RegisteredWorker::start() { impl_->start(); }

ipc::Result<ArenaUse> RegisteredWorker::enter() { return impl_->enter(); }

ipc::Result<ArenaUse> RegisteredWorker::enter(const ipc::SessionId& session, ipc::Epoch epoch) {
  return impl_->enter(session, epoch);
}

LayerWords& RegisteredWorker::layers() noexcept { return impl_->layers(); }

ipc::ComputeActivity& RegisteredWorker::activity() noexcept { return impl_->activity(); }

ipc::LeaseView RegisteredWorker::view() const { return impl_->view(); }

void RegisteredWorker::close() {
  if (home_.is_here()) impl_->close();
}

ipc::Result<std::unique_ptr<RegisteredWorker>> register_worker(ipc::Device& device,
                                                               const ipc::RankConfig& identity,
                                                               ipc::ArenaSource& regions,
                                                               WorkerHooks hooks) {
  try {
    auto worker = std::make_unique<RegisteredWorker>(device, identity, &regions, std::move(hooks));
    worker->start();
    return worker;
  } catch (const ipc::Exception& exception) {
    return exception.error();
  }
}

}  // namespace kvferry::worker
