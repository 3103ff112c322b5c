// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/offer_pace.hpp"

namespace kvferry::worker {

Status OfferPace::admit(Client& client, std::size_t blocks, std::size_t most) {
  const auto since = client.unanswered_since();
  if (!since) unanswered_ = 0;
  const bool is_overdue = since && ipc::MonotonicClock::now() - *since >= kAnswerTime;
  if (is_overdue || (unanswered_ > 0 && unanswered_ + blocks > most)) {
    KVFERRY_TRY(client.wait_answered(ipc::Deadline::at(since.value() + kAnswerTime)));
    unanswered_ = 0;
  }
  unanswered_ += blocks;
  return ipc::ok();
}

}  // namespace kvferry::worker
