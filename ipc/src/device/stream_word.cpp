// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/stream_word.hpp"

#include "device/word_news.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace kvferry::ipc {
namespace {

constexpr std::chrono::milliseconds kWordLook{100};

struct News {
  std::mutex mutex;
  std::condition_variable changed;
};
// Never destroyed: streams of other static objects may outlive it.
News& news() {
  // NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): a mutex and its condition
  static auto& all = *std::make_unique<News>().release();
  return all;
}

}  // namespace

void StreamWord::store(std::uint32_t value) const noexcept {
  std::atomic_ref<std::uint32_t>(*place_).store(value, std::memory_order_release);
  word_news::tell();
}

std::uint32_t StreamWord::load() const noexcept {
  return std::atomic_ref<std::uint32_t>(*place_).load(std::memory_order_acquire);
}

void word_news::tell() noexcept {
  // The lock orders this behind the look of a waiter that is about to sleep.
  { const std::lock_guard lock(news().mutex); }
  news().changed.notify_all();
}

void word_news::wait(const StreamWord& word,
                     std::uint32_t at_least,
                     const std::function<bool()>& is_over) {
  std::unique_lock lock(news().mutex);
  while (!StreamWord::has_reached(word.load(), at_least) && !is_over()) {
    // wait: the word, as a GPU would for ever; kWordLook, then it is looked at again; is_over, the
    // end of the stream
    news().changed.wait_until(lock, Deadline::after(kWordLook).when());
  }
}

}  // namespace kvferry::ipc
