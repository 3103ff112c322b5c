// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/kv_answers.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "wire/big_endian.hpp"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

// Of one peer, unsent: what a slow reader may keep here.
constexpr int kMostQueuedAnswers = 64;
// Of one turn.
constexpr int kMostRequestsAtOnce = 64;
constexpr std::size_t kMostReplayedAtOnce = 64;
constexpr std::size_t kMostReplayedBytes = 256U << 10U;

constexpr std::uint64_t kEndSequence = ~std::uint64_t{0};

EventSocket::Part text_part(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

bool is_word(const Bytes& part, std::string_view word) {
  return std::equal(part.begin(), part.end(), word.begin(), word.end());
}

}  // namespace

KvAnswers::KvAnswers(EventLoop& loop,
                     const std::string& endpoint,
                     const Digest& life,
                     const KeptBatches& kept,
                     KvSnapshotSource& source)
    : loop_(loop),
      life_(life),
      kept_(kept),
      source_(source),
      socket_(zmq::socket_type::router, endpoint, kMostQueuedAnswers) {
  loop_.watch(socket_.fd(), [this] { on_socket(); });
}

KvAnswers::~KvAnswers() {
  loop_.cancel(timer_);
  loop_.unwatch(socket_.fd());
}

// It announces requests, and peers that have room again or are gone.
void KvAnswers::on_socket() {
  for (Answer& answer : answers_) answer.waits = false;
  receive();
  serve_soon();
}

// While as many as may be are under way, the next requests wait in the socket: each turn ends with
// a look at it.
void KvAnswers::receive() {
  for (int i = 0; i < kMostRequestsAtOnce && socket_.readable(); ++i) {
    const bool is_full = answers_.size() >= KvEventPublisher::kMostAnswers;
    if (is_full && !answers_.back().waits) return;
    const auto request = socket_.try_receive();
    if (!request) return;
    begin(*request);
  }
}

void KvAnswers::begin(const std::vector<Bytes>& request) {
  ++requests_;
  constexpr std::size_t kOfVllm = 3;
  const bool of_vllm = request.size() == kOfVllm;
  const bool is_snapshot = request.size() == kOfVllm + 1 && is_word(request[3], "snapshot");
  const bool is_replay = request.size() == kOfVllm + 1 && is_word(request[3], "replay");
  const auto from = request.size() >= kOfVllm ? read_big_endian(request[2]) : std::nullopt;
  if ((!of_vllm && !is_snapshot && !is_replay) || !request[1].empty() || !from) {
    ++refused_;
    log_debug("KV events: a request of {} parts is none", request.size());
    return;
  }
  // A peer has one at a time: the last that it asked for.
  std::erase_if(answers_, [&](const Answer& other) { return other.peer == request[0]; });
  if (answers_.size() >= KvEventPublisher::kMostAnswers) answers_.pop_back();
  Answer answer{.peer = request[0],
                .form = of_vllm       ? Form::kReplayOfVllm
                        : is_snapshot ? Form::kSnapshot
                                      : Form::kReplay,
                .next = is_snapshot ? kept_.next() : *from};
  answers_.push_front(std::move(answer));
}

void KvAnswers::serve_soon() {
  if (timer_ != 0 || answers_.empty() || answers_.front().waits) return;
  timer_ = loop_.at(MonotonicClock::now(), [this] {
    timer_ = 0;
    serve();
  });
}

void KvAnswers::serve() {
  const auto turn = answers_.begin();
  if (turn == answers_.end() || turn->waits) return;
  switch (advance(*turn)) {
    case Progress::kMore: {
      // Behind the others, before those that wait.
      const auto waiting = std::find_if(answers_.begin(), answers_.end(),
                                        [](const Answer& other) { return other.waits; });
      answers_.splice(waiting, answers_, turn);
      break;
    }
    case Progress::kWaits:
      turn->waits = true;
      answers_.splice(answers_.end(), answers_, turn);
      break;
    case Progress::kEnded: answers_.erase(turn); break;
  }
  // The descriptor does not announce again what sending has made known.
  receive();
  serve_soon();
}

KvAnswers::Progress KvAnswers::after_send(int error, Progress sent) {
  if (error == 0) return sent;
  // Whoever is gone asks again when it is back.
  return error == EAGAIN ? Progress::kWaits : Progress::kEnded;
}

KvAnswers::Progress KvAnswers::advance(Answer& answer) {
  return answer.form == Form::kSnapshot ? advance_snapshot(answer) : advance_replay(answer);
}

KvAnswers::Progress KvAnswers::advance_replay(Answer& answer) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < kMostReplayedAtOnce && bytes < kMostReplayedBytes; ++i) {
    answer.next = std::max(answer.next, kept_.first());
    if (answer.next >= kept_.next()) return end(answer);
    const KeptBatches::Batch& batch = kept_.at(answer.next);
    const auto sequence = to_big_endian(answer.next);
    const int error =
        answer.form == Form::kReplayOfVllm
            ? socket_.send({answer.peer, {}, sequence, batch.bytes})
            : socket_.send({answer.peer, {}, sequence, batch.bytes, text_part(batch.topic)});
    if (error != 0) return after_send(error, Progress::kMore);
    ++answer.next;
    bytes += batch.size();
  }
  return Progress::kMore;
}

KvAnswers::Progress KvAnswers::advance_snapshot(Answer& answer) {
  if (answer.parts.empty()) {
    if (!answer.slice) return end(answer);
    KvSnapshotSource::Slice slice = source_.slice(*answer.slice);
    answer.slice = slice.next;
    for (KvSnapshotSource::Part& part : slice.parts) answer.parts.push_back(std::move(part));
  }
  const auto sequence = to_big_endian(answer.next);
  while (!answer.parts.empty()) {
    const KvSnapshotSource::Part& part = answer.parts.front();
    const int error = socket_.send({answer.peer, {}, sequence, part.batch, text_part(part.topic)});
    if (error != 0) return after_send(error, Progress::kMore);
    answer.parts.pop_front();
  }
  return Progress::kMore;
}

KvAnswers::Progress KvAnswers::end(const Answer& answer) {
  const auto marker = to_big_endian(kEndSequence);
  // One from beyond the newest batch is told how far it is.
  const auto next = to_big_endian(answer.form == Form::kSnapshot ? answer.next : kept_.next());
  const int error = answer.form == Form::kReplayOfVllm
                        ? socket_.send({answer.peer, {}, marker, {}})
                        : socket_.send({answer.peer, {}, marker, life_.bytes, next});
  return after_send(error, Progress::kEnded);
}

}  // namespace kvferry::ipc
