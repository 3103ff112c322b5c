// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

/// What a FakeInstance does wrong, counted down where it is a number.
struct FakeFaults {
  int busy_answers = 0;          ///< Requests that are refused as busy.
  int wrong_answers_after = -1;  ///< From so many answers on, all are wrong. -1: none.
  int not_idle_updates = 0;
  int statuses = -1;  ///< So many are answered, later ones never. -1: all.
  bool forgets_long_requests = false;
  bool lacks_a_mover = false;
  bool other_weights = false;  ///< Updates to other weights than it was told to.
  bool quarantines = false;
  std::optional<ipc::MessageKind> fails{};  ///< This command, with an error.
};

/// The sockets of a manager, a scheduler and the runners of two ranks, answered by one thread as
/// theirs are, with answers that follow from prompt and weights.
class FakeInstance {
 public:
  static constexpr std::uint32_t kRanks = 2;
  /// Of so many requests the long ones are not over before a command comes, however long that
  /// takes: half of an iteration's, for which a loop does not wait.
  static constexpr std::size_t kUnderWay = 4;

  FakeInstance(ipc::RuntimeDir dir, std::string engine, ipc::Digest weights, FakeFaults faults)
      : dir_(std::move(dir)),
        engine_(std::move(engine)),
        weights_(weights),
        faults_(faults),
        thread_("fake", ipc::OwnThread::Runs::kOurCode, [this] { serve(); }) {
    up_.get_future().get();
  }
  FakeInstance(const FakeInstance&) = delete;
  FakeInstance& operator=(const FakeInstance&) = delete;
  ~FakeInstance() { loop_.stop(); }

 private:
  using Answer = std::function<void(const ipc::Peer&, ipc::Envelope)>;
  class Service final : public ipc::ControlHandler {
   public:
    Service(ipc::EventLoop& loop, const ipc::ControlServer::Options& options, Answer answer)
        : answer_(std::move(answer)), server(loop, options, *this) {}
    void on_peer(const ipc::Peer&) override {}
    void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override {
      answer_(peer, std::move(envelope));
    }
    void on_peer_silent(const ipc::Peer&) override {}
    void on_peer_died(const ipc::Peer&) override {}

   private:
    Answer answer_;

   public:
    ipc::ControlServer server;  ///< Ends before what it calls.
  };
  struct Request {
    ipc::Peer peer;
    ipc::Envelope envelope;
    ipc::Generate asked;
    ipc::Digest weights_first;
    std::uint32_t admissions = 1;
  };

  void serve() {
    const auto options = [](std::filesystem::path registry, std::filesystem::path control) {
      ipc::ControlServer::Options made;
      made.registry_path = std::move(registry);
      made.control_path = std::move(control);
      made.session = ipc::SessionId::random();
      return made;
    };
    Service manager(loop_, options(dir_.registry_socket(), dir_.control_socket()),
                    [this](const auto& peer, auto message) { on_command(peer, message); });
    manager_ = &manager.server;
    Service scheduler(loop_,
                      options(dir_.rank_socket(engine_, 0, ipc::RuntimeDir::kGenerate),
                              dir_.rank_socket(engine_, 0, ipc::RuntimeDir::kGenerateControl)),
                      [this](const auto& peer, auto message) { on_generate(peer, message); });
    scheduler_ = &scheduler.server;
    std::vector<std::unique_ptr<Service>> runners;
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      runners.push_back(std::make_unique<Service>(
          loop_,
          options(dir_.rank_socket(engine_, rank, "step"),
                  dir_.rank_socket(engine_, rank, ipc::RuntimeDir::kStepControl)),
          [this, rank, &runners](const auto& peer, auto message) {
            on_look(runners[rank]->server, peer, message);
          }));
    }
    up_.set_value();
    loop_.run();
  }

  void on_look(ipc::ControlServer& server, const ipc::Peer& peer, const ipc::Envelope& message) {
    if (message.kind == ipc::MessageKind::kStepHello) {
      (void)server.reply(peer.id, message, ipc::Empty{});
      return;
    }
    if (faults_.fails == message.kind) {
      (void)server.reply_error(peer.id, message, KVFERRY_ERROR(kProtocol, "planted"));
      return;
    }
    ipc::WorkerMemory memory;
    memory.reserved = paused_ ? 60 << 20 : 50 << 20;
    memory.used = 30 << 20;
    memory.free_on_device = 200 << 20;
    memory.empties.assign(ipc::kEmptyReasons, 0);
    memory.empties[2] = emptied_;
    (void)server.reply(peer.id, message, memory);
  }

  static std::uint64_t digest_of(const ipc::Generate& asked, const ipc::Digest& weights) {
    return ipc::Digest::hash(asked.prompt.data(), asked.prompt.size() * sizeof(std::uint32_t),
                             weights.low())
        .low();
  }

  void on_generate(const ipc::Peer& peer, const ipc::Envelope& message) {
    if (faults_.busy_answers > 0) {
      --faults_.busy_answers;
      (void)scheduler_->reply_error(peer.id, message, KVFERRY_ERROR(kBusy, "planted"));
      return;
    }
    Request request{peer, message, {}, weights_, 1};
    request.asked = ipc::decode<ipc::Generate>(message.body, "Generate").value();
    const bool lasts = is_long(request.asked);
    if (lasts && faults_.forgets_long_requests) return;
    const std::uint64_t id = next_++;
    requests_.emplace(id, std::move(request));
    loop_.after(std::chrono::milliseconds(lasts ? 8 : 1), [this, id] { complete(id); });
  }

  static bool is_long(const ipc::Generate& asked) { return asked.max_tokens >= 64; }

  void complete(std::uint64_t id) {
    const auto found = requests_.find(id);
    if (found == requests_.end() || paused_) return;
    if (is_long(found->second.asked) && requests_.size() <= kUnderWay) return;
    answer(found->second, ipc::GenerateEnd::kLength);
    requests_.erase(found);
  }

  void answer(const Request& request, ipc::GenerateEnd end) {
    ipc::GenerateReply reply;
    reply.end = end;
    reply.weights_first = request.weights_first;
    reply.weights_last = weights_;
    reply.admissions = request.admissions;
    std::uint64_t state = digest_of(request.asked, weights_);
    if (faults_.wrong_answers_after > 0) --faults_.wrong_answers_after;
    if (faults_.wrong_answers_after == 0) ++state;
    for (std::uint32_t i = 0; i < request.asked.max_tokens; ++i) {
      reply.tokens.push_back(static_cast<std::uint32_t>(state + i));
    }
    (void)scheduler_->reply(request.peer.id, request.envelope, reply);
  }

  void on_command(const ipc::Peer& peer, const ipc::Envelope& message) {
    if (faults_.fails == message.kind) {
      (void)manager_->reply_error(peer.id, message, KVFERRY_ERROR(kProtocol, "planted"));
      return;
    }
    const auto reply = [&](const auto& body) { (void)manager_->reply(peer.id, message, body); };
    switch (message.kind) {
      case ipc::MessageKind::kStatus:
        if (faults_.statuses == 0) return;
        if (faults_.statuses > 0) --faults_.statuses;
        return reply(ipc::StatusReply{status()});
      case ipc::MessageKind::kPause: {
        const auto asked = ipc::decode<ipc::PauseRequest>(message.body, "PauseRequest").value();
        paused_ = asked.mode;
        stop_requests();
        return reply(ipc::PauseReply{1, {}, {}});
      }
      case ipc::MessageKind::kUpdateWeights: {
        if (faults_.not_idle_updates > 0) {
          --faults_.not_idle_updates;
          (void)manager_->reply_error(peer.id, message, KVFERRY_ERROR(kNotIdle, "planted"));
          return;
        }
        const auto asked =
            ipc::decode<ipc::UpdateWeightsRequest>(message.body, "UpdateWeightsRequest").value();
        EXPECT_EQ(asked.flush_cache, paused_ != ipc::PauseMode::kInPlace);
        EXPECT_TRUE(std::filesystem::exists(asked.source.location));
        weights_ = faults_.other_weights ? ipc::Digest::random() : asked.weights.value();
        return reply(ipc::UpdateWeightsReply{weights_, {}, {}, {}});
      }
      case ipc::MessageKind::kClear: {
        ipc::ClearReply cleared;
        cleared.ranks.resize(kRanks);
        if (faults_.quarantines) cleared.ranks[1].outcome.kind = ipc::ClearKind::kQuarantined;
        return reply(cleared);
      }
      case ipc::MessageKind::kReinit: return reply(ipc::ReinitReply{});
      case ipc::MessageKind::kContinue: {
        const auto asked =
            ipc::decode<ipc::ContinueRequest>(message.body, "ContinueRequest").value();
        paused_.reset();
        ipc::ContinueReply done;
        emptied_ += asked.empty_cache ? 1 : 0;
        for (std::uint32_t rank = 0; asked.empty_cache && rank < kRanks; ++rank) {
          done.ranks.push_back(
              {ipc::Rank{rank}, {60 << 20, 40 << 20, 30 << 20, 200 << 20}, false, {}});
        }
        reply(done);
        for (const auto& [id, request] : std::exchange(requests_, {})) {
          answer(request, ipc::GenerateEnd::kLength);
        }
        return;
      }
      default: ADD_FAILURE() << "unexpected " << to_string(message.kind);
    }
  }

  void stop_requests() {
    if (paused_ == ipc::PauseMode::kAbort) {
      for (const auto& [id, request] : std::exchange(requests_, {})) {
        answer(request, ipc::GenerateEnd::kAborted);
      }
    }
    if (paused_ == ipc::PauseMode::kRetract) {
      for (auto& [id, request] : requests_) ++request.admissions;
    }
  }

  [[nodiscard]] std::string status() const {
    nlohmann::json ranks = nlohmann::json::array();
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      const nlohmann::json process = {{"mapped", true}};
      ranks.push_back({{"worker", process}, {"mover", process}});
    }
    if (faults_.lacks_a_mover) ranks[1]["mover"] = nullptr;
    return nlohmann::json{{"engines",
                           {{{"name", engine_},
                             {"offload_ready", !faults_.lacks_a_mover},
                             {"weights", weights_.hex()},
                             {"ranks", ranks}}}}}
        .dump();
  }

  const ipc::RuntimeDir dir_;
  const std::string engine_;
  ipc::EventLoop loop_;
  // All below: of the thread.
  ipc::Digest weights_;
  FakeFaults faults_;
  ipc::ControlServer* manager_ = nullptr;
  ipc::ControlServer* scheduler_ = nullptr;
  std::optional<ipc::PauseMode> paused_;
  std::map<std::uint64_t, Request> requests_;
  std::uint64_t next_ = 0;
  std::uint64_t emptied_ = 0;
  std::promise<void> up_;
  ipc::OwnThread thread_;  ///< Last: starts when all above exists.
};

}  // namespace kvferry::test
