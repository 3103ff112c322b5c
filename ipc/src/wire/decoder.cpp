// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <fmt/format.h>

#include <bit>
#include <cstring>

// A cursor over the bytes rather than msgpack's own objects: a tree of those would be built before
// anything is known about the message, from counts that its sender chose.
namespace kvferry::ipc {
namespace {

// First bytes of the msgpack encodings that messages use.
constexpr std::uint8_t kPositiveFixintMax = 0x7f;
constexpr std::uint8_t kFixarray = 0x90;
constexpr std::uint8_t kFixstr = 0xa0;
constexpr std::uint8_t kFalse = 0xc2;
constexpr std::uint8_t kTrue = 0xc3;
constexpr std::uint8_t kBin8 = 0xc4;
constexpr std::uint8_t kBin16 = 0xc5;
constexpr std::uint8_t kBin32 = 0xc6;
constexpr std::uint8_t kFloat64 = 0xcb;
constexpr std::uint8_t kUint8 = 0xcc;
constexpr std::uint8_t kUint16 = 0xcd;
constexpr std::uint8_t kUint32 = 0xce;
constexpr std::uint8_t kUint64 = 0xcf;
constexpr std::uint8_t kInt8 = 0xd0;
constexpr std::uint8_t kInt16 = 0xd1;
constexpr std::uint8_t kInt32 = 0xd2;
constexpr std::uint8_t kInt64 = 0xd3;
constexpr std::uint8_t kStr8 = 0xd9;
constexpr std::uint8_t kStr16 = 0xda;
constexpr std::uint8_t kStr32 = 0xdb;
constexpr std::uint8_t kArray16 = 0xdc;
constexpr std::uint8_t kArray32 = 0xdd;
constexpr std::uint8_t kNegativeFixintMin = 0xe0;

// A two's complement number of so many bytes.
std::int64_t sign_extend(std::uint64_t value, unsigned bytes) noexcept {
  const std::uint64_t sign = std::uint64_t{1} << (8 * bytes - 1);
  return std::bit_cast<std::int64_t>((value ^ sign) - sign);
}

}  // namespace

struct Decoder::State {
  std::span<const std::uint8_t> bytes;
  std::size_t position = 0;
  int depth = 0;
  bool failed = false;
  std::string reason;  // of the first failure

  [[nodiscard]] std::size_t left() const noexcept { return bytes.size() - position; }

  void fail(std::string_view what) {
    if (failed) return;
    failed = true;
    reason = fmt::format("{} at byte {} of {}", what, position, bytes.size());
  }

  // The next bytes, or none (and failure) when there are fewer.
  std::span<const std::uint8_t> take(std::uint64_t count) {
    if (failed) return {};
    if (count > left()) {
      fail(fmt::format("{} bytes are needed, {} are left", count, left()));
      return {};
    }
    const auto taken = bytes.subspan(position, static_cast<std::size_t>(count));
    position += taken.size();
    return taken;
  }

  // An unsigned big-endian integer of 1, 2, 4 or 8 bytes.
  std::uint64_t take_uint(std::size_t size) {
    std::uint64_t value = 0;
    for (const std::uint8_t byte : take(size)) value = value << 8U | byte;
    return value;
  }

  // The first byte of the next value; zero after a failure.
  std::uint8_t take_head() { return static_cast<std::uint8_t>(take_uint(1)); }

  // Length of a string of bytes or text, checked against what is left.
  std::span<const std::uint8_t> take_string(std::uint64_t size) {
    if (size > kMaxWireBytes) {
      fail(fmt::format("string of {} bytes, {} are allowed", size, kMaxWireBytes));
    }
    return take(size);
  }
};

Decoder::Decoder(std::span<const std::uint8_t> bytes) : state_(std::make_unique<State>()) {
  state_->bytes = bytes;
  if (bytes.size() > kMaxWireBytes) {
    state_->fail(fmt::format("message of {} bytes, {} are allowed", bytes.size(), kMaxWireBytes));
  }
}

Decoder::~Decoder() = default;

Status Decoder::finish(std::string_view message_name) {
  if (!state_->failed && state_->left() != 0) state_->fail("bytes are left over");
  if (!state_->failed) return ok();
  return KVFERRY_ERROR(kProtocol, "malformed {}: {}", message_name, state_->reason);
}

void Decoder::fail(std::string_view what) { state_->fail(what); }

bool Decoder::failed() const noexcept { return state_->failed; }

void Decoder::expect_array(std::uint64_t count) {
  const std::uint64_t found = begin_any_array();
  if (!state_->failed && found != count) {
    state_->fail(fmt::format("{} fields, expected {}", found, count));
  }
}

std::uint64_t Decoder::begin_any_array() {
  const std::uint8_t head = state_->take_head();
  std::uint64_t count = 0;
  if ((head & 0xf0U) == kFixarray) {
    count = head & 0x0fU;
  } else if (head == kArray16) {
    count = state_->take_uint(2);
  } else if (head == kArray32) {
    count = state_->take_uint(4);
  } else {
    state_->fail(fmt::format("type {:#04x}, expected an array", head));
  }
  if (++state_->depth > kMaxWireDepth) state_->fail("nesting too deep");
  // Every element takes a byte at least: a count beyond what is left is a lie, found before
  // anything is allocated for it.
  if (!state_->failed && (count > kMaxWireElements || count > state_->left())) {
    state_->fail(fmt::format("array of {} elements with {} bytes left", count, state_->left()));
  }
  return state_->failed ? 0 : count;
}

void Decoder::end_array() { --state_->depth; }

std::uint64_t Decoder::get_uint(std::uint64_t max) {
  const std::uint8_t head = state_->take_head();
  std::uint64_t value = head;
  switch (head) {
    case kUint8: value = state_->take_uint(1); break;
    case kUint16: value = state_->take_uint(2); break;
    case kUint32: value = state_->take_uint(4); break;
    case kUint64: value = state_->take_uint(8); break;
    default:
      if (head > kPositiveFixintMax) {
        state_->fail(fmt::format("type {:#04x}, expected an unsigned integer", head));
      }
  }
  if (!state_->failed && value > max) state_->fail(fmt::format("{}, at most {}", value, max));
  return state_->failed ? 0 : value;
}

std::uint64_t Decoder::get_enum(std::uint64_t min, std::uint64_t max) {
  const std::uint64_t value = get_uint(max);
  if (!state_->failed && value < min) state_->fail(fmt::format("{}, at least {}", value, min));
  return value;
}

std::int64_t Decoder::get_int(std::int64_t min, std::int64_t max) {
  const std::uint8_t head = state_->take_head();
  std::int64_t value = 0;
  switch (head) {
    case kInt8: value = sign_extend(state_->take_uint(1), 1); break;
    case kInt16: value = sign_extend(state_->take_uint(2), 2); break;
    case kInt32: value = sign_extend(state_->take_uint(4), 4); break;
    case kInt64: value = sign_extend(state_->take_uint(8), 8); break;
    case kUint8: value = static_cast<std::int64_t>(state_->take_uint(1)); break;
    case kUint16: value = static_cast<std::int64_t>(state_->take_uint(2)); break;
    case kUint32: value = static_cast<std::int64_t>(state_->take_uint(4)); break;
    case kUint64: {
      const std::uint64_t large = state_->take_uint(8);
      if (large > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        state_->fail(fmt::format("{}, at most {}", large, max));
      } else {
        value = static_cast<std::int64_t>(large);
      }
      break;
    }
    default:
      if (head <= kPositiveFixintMax || head >= kNegativeFixintMin) {
        value = sign_extend(head, 1);
      } else {
        state_->fail(fmt::format("type {:#04x}, expected an integer", head));
      }
  }
  if (!state_->failed && (value < min || value > max)) {
    state_->fail(fmt::format("{}, expected {} to {}", value, min, max));
  }
  return state_->failed ? 0 : value;
}

double Decoder::get_double() {
  if (const std::uint8_t head = state_->take_head(); head != kFloat64) {
    state_->fail(fmt::format("type {:#04x}, expected a number", head));
  }
  return std::bit_cast<double>(state_->take_uint(sizeof(double)));
}

bool Decoder::get_bool() {
  const std::uint8_t head = state_->take_head();
  if (head != kTrue && head != kFalse) {
    state_->fail(fmt::format("type {:#04x}, expected true or false", head));
  }
  return head == kTrue;
}

std::string Decoder::get_string() {
  const std::uint8_t head = state_->take_head();
  std::uint64_t size = 0;
  if ((head & 0xe0U) == kFixstr) {
    size = head & 0x1fU;
  } else if (head == kStr8) {
    size = state_->take_uint(1);
  } else if (head == kStr16) {
    size = state_->take_uint(2);
  } else if (head == kStr32) {
    size = state_->take_uint(4);
  } else {
    state_->fail(fmt::format("type {:#04x}, expected text", head));
  }
  const auto text = state_->take_string(size);
  return {text.begin(), text.end()};
}

Bytes Decoder::get_bytes() {
  const std::uint8_t head = state_->take_head();
  std::uint64_t size = 0;
  switch (head) {
    case kBin8: size = state_->take_uint(1); break;
    case kBin16: size = state_->take_uint(2); break;
    case kBin32: size = state_->take_uint(4); break;
    default: state_->fail(fmt::format("type {:#04x}, expected bytes", head));
  }
  const auto bytes = state_->take_string(size);
  return {bytes.begin(), bytes.end()};
}

void Decoder::read(Digest& digest) {
  const std::uint8_t head = state_->take_head();
  const std::uint64_t size = head == kBin8 ? state_->take_uint(1) : 0;
  if (size != digest.bytes.size()) {
    state_->fail(fmt::format("expected {} bytes of a digest", digest.bytes.size()));
  }
  const auto bytes = state_->take(digest.bytes.size());
  if (!bytes.empty()) std::memcpy(digest.bytes.data(), bytes.data(), bytes.size());
}

void Decoder::read(Error& error) {
  expect_array(3);
  read(error.code);
  error.message = get_string();
  error.native_code =
      static_cast<int>(get_int(std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
  end_array();
}

}  // namespace kvferry::ipc
