// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A ring of messages whose other end writes anything into the memory that both share, between any
// two calls.
#include "wire/message_ring.hpp"

#include "fuzz.hpp"

#include <algorithm>
#include <array>
#include <memory>

namespace kvferry::fuzz {
namespace {

constexpr std::size_t kCapacity = 512;

struct alignas(128) Segment {
  std::array<std::byte, ipc::ring::segment_bytes(kCapacity)> bytes{};
};

void scribble(Segment& segment, Input& input) {
  constexpr std::array kWords{ipc::ring::kWrittenOffset, ipc::ring::kReadOffset,
                              ipc::ring::kAsleepOffset, ipc::ring::kDataOffset};
  const std::size_t at = kWords.at(input.byte() % kWords.size()) + input.byte() % 64U;
  const auto bytes = input.take(1U + input.byte() % 24U);
  std::transform(bytes.begin(), bytes.end(), segment.bytes.begin() + static_cast<long>(at),
                 [](std::uint8_t byte) { return std::byte{byte}; });
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const auto segment = std::make_unique<fuzz::Segment>();
  ipc::RingReader reader(segment->bytes.data(), fuzz::kCapacity);
  ipc::RingWriter writer(segment->bytes.data(), fuzz::kCapacity);
  for (int step = 0; step < 64; ++step) {
    switch (input.byte() % 4U) {
      case 0: fuzz::scribble(*segment, input); break;
      case 1: {
        const ipc::Bytes message(input.byte(), 7);
        (void)writer.try_write(static_cast<std::uint64_t>(step), message);
        (void)writer.take_bell();
        break;
      }
      case 2: {
        const auto next = reader.next();
        if (!next || !next->has_value()) break;
        const auto message = reader.take();
        KVFERRY_CHECK(message.size() <= fuzz::kCapacity, "more than the ring has");
        break;
      }
      case 3: (void)reader.ask_for_bell(); break;
    }
  }
  return 0;
}
