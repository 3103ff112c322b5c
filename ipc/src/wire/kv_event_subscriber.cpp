// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/kv_event_subscriber.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "wire/big_endian.hpp"
#include "wire/event_socket.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

using std::chrono_literals::operator""s;

constexpr int kMostUnread = 100'000;
// Of live batches that wait for what comes before them.
constexpr std::size_t kMostHeld = 100'000;
// Without a part of an answer for so long, it is asked again.
constexpr Duration kAnswerTime = 5s;
// Without a batch for so long, it asks whether there was none.
constexpr Duration kCheckTime = 1s;
constexpr std::uint64_t kEndOfAnswer = ~std::uint64_t{0};

EventSocket::Part request_word(std::string_view word) {
  return {reinterpret_cast<const std::uint8_t*>(word.data()), word.size()};
}

}  // namespace

class KvEventSubscriber::Impl {
 public:
  explicit Impl(const Options& options)
      : options_(options),
        live_(EventSocket::connect(zmq::socket_type::sub, options.endpoint, kMostUnread)) {
    if (can_ask()) ask(Asked::kSnapshot);
  }

  Result<std::optional<News>> next(Deadline deadline) {
    while (ready_.empty()) {
      const bool any_live = take_live();
      const bool any_answer = take_answers();
      if (any_live || any_answer) continue;
      if (act_on_time()) continue;
      if (deadline.expired()) return std::optional<News>();
      wait(deadline);
    }
    Result<News> first = std::move(ready_.front());
    ready_.pop_front();
    if (!first) return std::move(first).error();
    count(*first);
    return std::optional<News>(std::move(first).value());
  }
  [[nodiscard]] std::optional<std::uint64_t> expected() const noexcept { return expected_; }
  [[nodiscard]] bool is_connected() noexcept { return live_.is_connected(); }

 private:
  using Kind = News::Kind;
  enum class Asked : std::uint8_t { kNothing, kReplay, kSnapshot };
  struct Held {
    std::string topic;
    Bytes batch;
  };

  [[nodiscard]] bool can_ask() const noexcept { return !options_.snapshot_endpoint.empty(); }

  void count(const News& given) {
    switch (given.kind) {
      case Kind::kReset: expected_.reset(); return;
      case Kind::kSnapshot: return;
      case Kind::kComplete: expected_ = given.sequence; return;
      case Kind::kLive:
      case Kind::kReplayed: expected_ = given.sequence + 1; return;
      case Kind::kLost: expected_ = given.until + 1; return;
    }
  }

  // Over a connection of its own each time that the last answer is not known to have ended, so that
  // nothing of one request is taken for an answer to another.
  void ask(Asked what) {
    if (asked_ != Asked::kNothing || !answers_) {
      answers_.emplace(
          EventSocket::connect(zmq::socket_type::dealer, options_.snapshot_endpoint, kMostUnread));
    }
    asked_ = what;
    has_begun_ = false;
    is_too_old_ = false;
    const auto from = to_big_endian(next_.value_or(0));
    const int error =
        answers_->send({{}, from, request_word(what == Asked::kSnapshot ? "snapshot" : "replay")});
    if (error != 0) log_debug("KV events: a request was not sent (errno {})", error);
    act_at_ = MonotonicClock::now() + kAnswerTime;
  }
  void ask_for_snapshot() {
    if (asked_ == Asked::kSnapshot) return;
    ask(Asked::kSnapshot);
  }

  bool act_on_time() {
    if (!can_ask() || MonotonicClock::now() < act_at_) return false;
    ask(asked_ == Asked::kNothing ? Asked::kReplay : Asked::kSnapshot);
    return true;
  }

  void wait(Deadline deadline) {
    std::array<pollfd, 2> watched{pollfd{live_.fd(), POLLIN, 0}, pollfd{-1, POLLIN, 0}};
    if (answers_) watched[1].fd = answers_->fd();
    const Deadline until = can_ask() ? deadline.earlier(Deadline::at(act_at_)) : deadline;
    // wait: batches of a publisher, and its answers; until, the caller's deadline or when it is to
    // be asked; nothing: a publisher that ends is asked in vain, and another one may come
    (void)::poll(watched.data(), watched.size(), until.poll_timeout_ms());
  }

  bool take_live() {
    constexpr int kAtOnce = 256;
    bool any = false;
    for (int i = 0; i < kAtOnce && live_.readable(); ++i) {
      auto parts = live_.try_receive();
      if (!parts) break;
      any = true;
      const auto sequence = parts->size() >= 2 ? read_big_endian((*parts)[1]) : std::nullopt;
      if (parts->size() != 3 || !sequence) {
        ready_.emplace_back(
            KVFERRY_ERROR(kProtocol, "a KV event of {} parts, or without a number", parts->size()));
        continue;
      }
      const Bytes& topic = (*parts)[0];
      on_live(*sequence, {std::string(topic.begin(), topic.end()), std::move((*parts)[2])});
    }
    return any;
  }

  void on_live(std::uint64_t sequence, Held held) {
    // A publisher's numbers only grow: this one is another.
    const bool is_another = last_live_ && sequence <= *last_live_;
    last_live_ = sequence;
    if (is_another) {
      held_.clear();
      if (can_ask()) {
        ask(Asked::kSnapshot);
      } else {
        next_.reset();
        ready_.emplace_back(News{.kind = Kind::kReset, .topic = {}, .batch = {}});
      }
    }
    if (asked_ == Asked::kNothing) {
      take_in_turn(sequence, std::move(held));
      return;
    }
    held_.insert_or_assign(sequence, std::move(held));
    // The answer then ends before what was held: that is asked for again, or all is.
    if (held_.size() > kMostHeld) held_.clear();
  }

  void take_in_turn(std::uint64_t sequence, Held held) {
    act_at_ = MonotonicClock::now() + kCheckTime;
    if (!next_) next_ = sequence;
    if (sequence < *next_) return;
    if (sequence > *next_) {
      if (can_ask()) {
        held_.insert_or_assign(sequence, std::move(held));
        ask(Asked::kReplay);
        return;
      }
      ready_.emplace_back(News{.kind = Kind::kLost,
                               .sequence = *next_,
                               .until = sequence - 1,
                               .topic = {},
                               .batch = {}});
    }
    next_ = sequence + 1;
    give(Kind::kLive, sequence, std::move(held.topic), held.batch);
  }

  void give(Kind kind, std::uint64_t sequence, std::string topic, const Bytes& bytes) {
    auto batch = decode_kv_events(bytes);
    if (!batch) {
      ready_.emplace_back(std::move(batch).error());
      return;
    }
    ready_.emplace_back(News{.kind = kind,
                             .sequence = sequence,
                             .topic = std::move(topic),
                             .batch = std::move(batch).value()});
  }

  bool take_answers() {
    constexpr int kAtOnce = 256;
    bool any = false;
    for (int i = 0; i < kAtOnce && answers_ && answers_->readable(); ++i) {
      auto parts = answers_->try_receive();
      if (!parts) break;
      any = true;
      const auto sequence = parts->size() == 4 ? read_big_endian((*parts)[1]) : std::nullopt;
      if (!sequence) {
        ready_.emplace_back(
            KVFERRY_ERROR(kProtocol, "an answer about KV events of {} parts", parts->size()));
        continue;
      }
      if (asked_ == Asked::kNothing) continue;
      act_at_ = MonotonicClock::now() + kAnswerTime;
      if (*sequence == kEndOfAnswer) {
        on_end(*parts);
      } else {
        on_answer(*sequence, std::move(*parts));
      }
    }
    return any;
  }

  void on_answer(std::uint64_t sequence, std::vector<Bytes> parts) {
    std::string topic(parts[3].begin(), parts[3].end());
    if (asked_ == Asked::kSnapshot) {
      begin_snapshot();
      give(Kind::kSnapshot, sequence, std::move(topic), parts[2]);
      return;
    }
    if (!next_) next_ = sequence;
    if (sequence > *next_) is_too_old_ = true;
    if (sequence != *next_ || is_too_old_) return;
    next_ = sequence + 1;
    give(Kind::kReplayed, sequence, std::move(topic), parts[2]);
  }

  void begin_snapshot() {
    if (std::exchange(has_begun_, true)) return;
    ready_.emplace_back(News{.kind = Kind::kReset, .topic = {}, .batch = {}});
  }

  void on_end(const std::vector<Bytes>& parts) {
    const auto next = read_big_endian(parts[3]);
    const Asked asked = std::exchange(asked_, Asked::kNothing);
    act_at_ = MonotonicClock::now() + kCheckTime;
    if (asked == Asked::kSnapshot) {
      begin_snapshot();
      life_ = parts[2];
      next_ = next.value_or(0);
      ready_.emplace_back(
          News{.kind = Kind::kComplete, .sequence = *next_, .topic = {}, .batch = {}});
    } else if (is_too_old_ || parts[2] != life_ || !next || next_.value_or(0) < *next) {
      ask_for_snapshot();
      return;
    }
    // A gap among them is asked for; what is behind it stays held.
    while (!held_.empty() && asked_ == Asked::kNothing) {
      auto first = held_.extract(held_.begin());
      take_in_turn(first.key(), std::move(first.mapped()));
    }
  }

  Options options_;
  EventSocket live_;
  std::optional<EventSocket> answers_;
  Asked asked_ = Asked::kNothing;
  bool has_begun_ = false;   ///< The snapshot.
  bool is_too_old_ = false;  ///< The replay does not begin where it should.
  TimePoint act_at_{};       ///< When an answer is late, or one is to be asked for.
  Bytes life_;
  std::optional<std::uint64_t> next_;      ///< To be made ready.
  std::optional<std::uint64_t> expected_;  ///< To be given.
  std::optional<std::uint64_t> last_live_;
  std::map<std::uint64_t, Held> held_;  ///< Live batches behind what is asked for.
  std::deque<Result<News>> ready_;
};

KvEventSubscriber::KvEventSubscriber(const Options& options)
    : impl_(std::make_unique<Impl>(options)) {}

KvEventSubscriber::~KvEventSubscriber() = default;

Result<std::optional<KvEventSubscriber::News>> KvEventSubscriber::next(Deadline deadline) {
  return impl_->next(deadline);
}

bool KvEventSubscriber::is_connected() noexcept { return impl_->is_connected(); }

std::optional<std::uint64_t> KvEventSubscriber::expected() const noexcept {
  return impl_->expected();
}

}  // namespace kvferry::ipc
