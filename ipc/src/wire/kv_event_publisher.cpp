// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/kv_event_publisher.hpp"

#include "wire/big_endian.hpp"
#include "wire/event_socket.hpp"
#include "wire/kept_batches.hpp"
#include "wire/kv_answers.hpp"

#include <utility>

namespace kvferry::ipc {

class KvEventPublisher::Impl {
 public:
  Impl(EventLoop& loop, const Options& options, KvSnapshotSource& source)
      : loop_(loop),
        kept_(options.kept_batches, options.kept_bytes),
        socket_(zmq::socket_type::pub, options.endpoint, options.most_queued) {
    if (!options.snapshot_endpoint.empty()) {
      answers_.emplace(loop, options.snapshot_endpoint, options.life, kept_, source);
    }
    // So that those who come and go while nothing happens are noticed, and let go of.
    loop_.watch(socket_.fd(), [this] { (void)socket_.readable(); });
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() { loop_.unwatch(socket_.fd()); }

  void publish(const std::string& topic, Bytes batch, std::uint64_t events) {
    const auto sequence = to_big_endian(kept_.next());
    const KeptBatches::Batch& kept = kept_.add(topic, std::move(batch));
    const EventSocket::Part name(reinterpret_cast<const std::uint8_t*>(topic.data()), topic.size());
    events_ += events;
    if (!socket_.publish({name, sequence, kept.bytes})) ++dropped_;
  }
  [[nodiscard]] Stats stats() const noexcept {
    return {.batches = kept_.next(),
            .events = events_,
            .dropped = dropped_,
            .requests = answers_ ? answers_->requests() : 0,
            .refused = answers_ ? answers_->refused() : 0,
            .kept_batches = kept_.size(),
            .kept_bytes = kept_.bytes()};
  }
  [[nodiscard]] const std::string& endpoint() const noexcept { return socket_.endpoint(); }
  [[nodiscard]] const std::string& snapshot_endpoint() const noexcept {
    return answers_ ? answers_->endpoint() : kNone;
  }

 private:
  inline static const std::string kNone;

  EventLoop& loop_;
  KeptBatches kept_;
  EventSocket socket_;
  std::optional<KvAnswers> answers_;
  std::uint64_t events_ = 0;
  std::uint64_t dropped_ = 0;
};

KvEventPublisher::KvEventPublisher(EventLoop& loop, Options options, KvSnapshotSource& source)
    : impl_(std::make_unique<Impl>(loop, options, source)) {}

KvEventPublisher::~KvEventPublisher() = default;

void KvEventPublisher::publish(const std::string& topic, Bytes batch, std::uint64_t events) {
  impl_->publish(topic, std::move(batch), events);
}

KvEventPublisher::Stats KvEventPublisher::stats() const noexcept { return impl_->stats(); }

const std::string& KvEventPublisher::endpoint() const noexcept { return impl_->endpoint(); }

const std::string& KvEventPublisher::snapshot_endpoint() const noexcept {
  return impl_->snapshot_endpoint();
}

}  // namespace kvferry::ipc
