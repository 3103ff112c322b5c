// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/codec.hpp"

#include <fmt/format.h>
#include <msgpack.hpp>

#include <cstring>
#include <utility>

namespace kvferry::ipc {
namespace {

// What msgpack::packer writes to.
struct ByteStream {
  Bytes bytes;
  void write(const char* data, std::size_t size) {
    const std::size_t old = bytes.size();
    bytes.resize(old + size);
    if (size != 0) std::memcpy(bytes.data() + old, data, size);
  }
};

constexpr std::size_t kUsualMessageBytes = 256;

// Sizes beyond the limits of a message are refused where it is sent and where it is decoded; what
// msgpack cannot express at all was never a message.
std::uint32_t wire_size(std::uint64_t size) {
  KVFERRY_CHECK(size <= std::numeric_limits<std::uint32_t>::max(),
                fmt::format("{} elements in a message", size));
  return static_cast<std::uint32_t>(size);
}

}  // namespace

struct Encoder::State {
  ByteStream stream;
  msgpack::packer<ByteStream> packer{stream};
};

Encoder::Encoder() : state_(std::make_unique<State>()) {
  state_->stream.bytes.reserve(kUsualMessageBytes);
}

Encoder::~Encoder() = default;

Bytes Encoder::take() { return std::exchange(state_->stream.bytes, {}); }

void Encoder::begin_array(std::uint64_t count) { state_->packer.pack_array(wire_size(count)); }

void Encoder::put_uint(std::uint64_t value) { state_->packer.pack_uint64(value); }

void Encoder::put_int(std::int64_t value) { state_->packer.pack_int64(value); }

void Encoder::put_double(double value) { state_->packer.pack_double(value); }

void Encoder::put_bool(bool value) {
  if (value) {
    state_->packer.pack_true();
  } else {
    state_->packer.pack_false();
  }
}

void Encoder::put_string(std::string_view text) {
  const std::uint32_t size = wire_size(text.size());
  state_->packer.pack_str(size);
  state_->packer.pack_str_body(text.data(), size);
}

void Encoder::put_bytes(std::span<const std::uint8_t> bytes) {
  const std::uint32_t size = wire_size(bytes.size());
  state_->packer.pack_bin(size);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): msgpack takes bytes as char.
  state_->packer.pack_bin_body(reinterpret_cast<const char*>(bytes.data()), size);
}

}  // namespace kvferry::ipc
