// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/kv_events.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>

// Bytes of another process: a cursor over them, and no tree of objects, which would be built from
// counts that nobody has checked.
namespace kvferry::ipc {
namespace {

/// One value of msgpack: a number, a text, bytes, or the count of what follows.
struct EventItem {
  enum class Kind : std::uint8_t {
    kNil,
    kBool,
    kUint,
    kNegative,
    kFloat,
    kText,
    kBytes,
    kArray,
    kMap
  };
  Kind kind = Kind::kNil;
  std::uint64_t number = 0;  ///< kUint; kArray, kMap: elements, pairs.
  double real = 0;           ///< kFloat, kUint and kNegative.
  std::span<const std::uint8_t> data;

  [[nodiscard]] std::string_view text() const {
    return {reinterpret_cast<const char*>(data.data()), data.size()};
  }
};

class EventCursor {
 public:
  explicit EventCursor(std::span<const std::uint8_t> bytes) : bytes_(bytes) {
    if (bytes.size() > kMaxWireBytes) {
      fail(fmt::format("{} bytes, {} are allowed", bytes.size(), kMaxWireBytes));
    }
  }

  /// Nil after a failure.
  EventItem next() {
    const auto head = static_cast<std::uint8_t>(take_uint(1));
    if (failed()) return {};
    if (head < 0x80) return number(head);
    if (head < 0x90) return counted(EventItem::Kind::kMap, head & 0x0fU);
    if (head < 0xa0) return counted(EventItem::Kind::kArray, head & 0x0fU);
    if (head < 0xc0) return string(EventItem::Kind::kText, head & 0x1fU);
    if (head >= 0xe0) return negative(static_cast<std::int8_t>(head));
    return long_item(head);
  }
  /// The same, of one kind.
  EventItem next(EventItem::Kind kind, std::string_view what) {
    const EventItem item = next();
    if (!failed() && item.kind != kind) fail(fmt::format("{} of another type", what));
    return failed() ? EventItem{} : item;
  }
  /// The value that comes next, with all that is in it. Every step takes a byte at least.
  void skip() {
    for (std::uint64_t left = 1; left > 0 && !failed(); --left) {
      const EventItem item = next();
      if (item.kind == EventItem::Kind::kArray) left += item.number;
      if (item.kind == EventItem::Kind::kMap) left += 2 * item.number;
    }
  }
  void skip(std::uint64_t values) {
    for (; values > 0 && !failed(); --values) skip();
  }
  void fail(std::string_view what) {
    if (!reason_.empty()) return;
    reason_ = fmt::format("{} at byte {} of {}", what, at_, bytes_.size());
  }
  [[nodiscard]] bool failed() const noexcept { return !reason_.empty(); }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  [[nodiscard]] bool at_end() const noexcept { return at_ == bytes_.size(); }

 private:
  using Kind = EventItem::Kind;

  std::span<const std::uint8_t> take(std::uint64_t count) {
    if (failed()) return {};
    if (count > bytes_.size() - at_) {
      fail(fmt::format("{} bytes are needed", count));
      return {};
    }
    const auto taken = bytes_.subspan(at_, static_cast<std::size_t>(count));
    at_ += taken.size();
    return taken;
  }
  std::uint64_t take_uint(unsigned size) {
    std::uint64_t value = 0;
    for (const std::uint8_t byte : take(size)) value = value << 8U | byte;
    return value;
  }
  static EventItem number(std::uint64_t value) {
    return {.kind = Kind::kUint, .number = value, .real = static_cast<double>(value), .data = {}};
  }
  static EventItem negative(std::int64_t value) {
    if (value >= 0) return number(static_cast<std::uint64_t>(value));
    return {.kind = Kind::kNegative, .number = 0, .real = static_cast<double>(value), .data = {}};
  }
  static EventItem real(double value) {
    return {.kind = Kind::kFloat, .number = 0, .real = value, .data = {}};
  }
  EventItem string(Kind kind, std::uint64_t size) {
    const auto data = take(size);
    return {.kind = kind, .number = 0, .real = 0, .data = data};
  }
  EventItem counted(Kind kind, std::uint64_t count) {
    // Every element takes a byte at least: a count beyond what is left is a lie.
    if (count > kMaxWireElements || count > bytes_.size() - at_) {
      fail(fmt::format("{} elements", count));
      return {};
    }
    return {.kind = kind, .number = count, .real = 0, .data = {}};
  }
  EventItem extension(unsigned length_bytes, std::uint64_t size) {
    if (length_bytes != 0) size = take_uint(length_bytes);
    (void)take(1);  // its type
    (void)take(size);
    return {};
  }
  EventItem long_item(std::uint8_t head) {
    switch (head) {
      case 0xc0: return {};
      case 0xc2:
      case 0xc3: return {.kind = Kind::kBool, .number = head & 1U, .real = 0, .data = {}};
      case 0xc4: return string(Kind::kBytes, take_uint(1));
      case 0xc5: return string(Kind::kBytes, take_uint(2));
      case 0xc6: return string(Kind::kBytes, take_uint(4));
      case 0xc7: return extension(1, 0);
      case 0xc8: return extension(2, 0);
      case 0xc9: return extension(4, 0);
      case 0xca: return real(std::bit_cast<float>(static_cast<std::uint32_t>(take_uint(4))));
      case 0xcb: return real(std::bit_cast<double>(take_uint(8)));
      case 0xcc: return number(take_uint(1));
      case 0xcd: return number(take_uint(2));
      case 0xce: return number(take_uint(4));
      case 0xcf: return number(take_uint(8));
      case 0xd0: return negative(static_cast<std::int8_t>(take_uint(1)));
      case 0xd1: return negative(static_cast<std::int16_t>(take_uint(2)));
      case 0xd2: return negative(static_cast<std::int32_t>(take_uint(4)));
      case 0xd3: return negative(static_cast<std::int64_t>(take_uint(8)));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8: return extension(0, std::uint64_t{1} << (head - 0xd4U));
      case 0xd9: return string(Kind::kText, take_uint(1));
      case 0xda: return string(Kind::kText, take_uint(2));
      case 0xdb: return string(Kind::kText, take_uint(4));
      case 0xdc: return counted(Kind::kArray, take_uint(2));
      case 0xdd: return counted(Kind::kArray, take_uint(4));
      case 0xde: return counted(Kind::kMap, take_uint(2));
      case 0xdf: return counted(Kind::kMap, take_uint(4));
      default: fail(fmt::format("type {:#04x}", head)); return {};
    }
  }

  std::span<const std::uint8_t> bytes_;
  std::size_t at_ = 0;
  std::string reason_;
};

enum class EventField : std::uint8_t {
  kHashes,
  kBefore,
  kBlockSize,
  kGroup,
  kGroupKind,
  kWindow,
  kOther
};

using EventFields = std::span<const std::string_view>;

// As vLLM orders them.
constexpr auto kStoredFields = std::to_array<std::string_view>(
    {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
     "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"});
constexpr auto kRemovedFields =
    std::to_array<std::string_view>({"block_hashes", "medium", "group_idx"});

EventField field_named(std::string_view name) {
  if (name == "block_hashes") return EventField::kHashes;
  if (name == "parent_block_hash") return EventField::kBefore;
  if (name == "block_size") return EventField::kBlockSize;
  if (name == "group_idx") return EventField::kGroup;
  if (name == "kv_cache_spec_kind") return EventField::kGroupKind;
  if (name == "kv_cache_spec_sliding_window") return EventField::kWindow;
  return EventField::kOther;
}

/// What any event may say.
struct EventFieldValues {
  std::optional<std::vector<Digest>> hashes;
  Digest before;
  std::uint32_t block_size = 0;
  std::uint32_t group = 0;
  std::string group_kind;
  std::uint32_t window = 0;
};

Digest read_hash(EventCursor& cursor, const EventItem& item) {
  Digest hash;
  if (item.kind != EventItem::Kind::kBytes || item.data.size() != hash.bytes.size()) {
    cursor.fail("a hash that is not 16 bytes");
    return hash;
  }
  std::copy(item.data.begin(), item.data.end(), hash.bytes.begin());
  return hash;
}

/// Nil is the default.
std::uint32_t read_small(EventCursor& cursor, std::string_view what) {
  const EventItem item = cursor.next();
  if (item.kind == EventItem::Kind::kNil) return 0;
  if (item.kind != EventItem::Kind::kUint ||
      item.number > std::numeric_limits<std::uint32_t>::max()) {
    cursor.fail(fmt::format("{} is no number below 2^32", what));
    return 0;
  }
  return static_cast<std::uint32_t>(item.number);
}

std::vector<Digest> read_hashes(EventCursor& cursor) {
  const EventItem array = cursor.next(EventItem::Kind::kArray, "block_hashes");
  std::vector<Digest> hashes;
  for (std::uint64_t i = 0; i < array.number && !cursor.failed(); ++i) {
    hashes.push_back(read_hash(cursor, cursor.next()));
  }
  return hashes;
}

void read_field(EventCursor& cursor, EventField field, EventFieldValues& values) {
  switch (field) {
    case EventField::kHashes: values.hashes = read_hashes(cursor); return;
    case EventField::kBefore: {
      const EventItem item = cursor.next();
      if (item.kind != EventItem::Kind::kNil) values.before = read_hash(cursor, item);
      return;
    }
    case EventField::kBlockSize: values.block_size = read_small(cursor, "block_size"); return;
    case EventField::kGroup: values.group = read_small(cursor, "group_idx"); return;
    case EventField::kGroupKind: {
      const EventItem item = cursor.next();
      constexpr std::size_t kLongest = 256;
      if (item.kind == EventItem::Kind::kText) values.group_kind = item.text();
      if (values.group_kind.size() > kLongest) cursor.fail("a group's kind that is too long");
      return;
    }
    case EventField::kWindow: values.window = read_small(cursor, "the window"); return;
    case EventField::kOther: cursor.skip(); return;
  }
}

EventFields fields_of(std::string_view type) {
  if (type == "BlockStored") return kStoredFields;
  if (type == "BlockRemoved") return kRemovedFields;
  return {};
}

std::optional<KvEvent> make_event(EventCursor& cursor,
                                  std::string_view type,
                                  EventFieldValues values) {
  if (type == "AllBlocksCleared") return KvCleared{};
  if (type != "BlockStored" && type != "BlockRemoved") return std::nullopt;
  if (!values.hashes) {
    cursor.fail("an event without block_hashes");
    return std::nullopt;
  }
  if (type == "BlockRemoved") return KvRemoved{std::move(*values.hashes), GroupId{values.group}};
  return KvStored{.hashes = std::move(*values.hashes),
                  .before = values.before,
                  .tokens_per_block = values.block_size,
                  .group = GroupId{values.group},
                  .group_kind = std::move(values.group_kind),
                  .window_tokens = values.window};
}

/// Nothing for an event of a type that we do not know.
std::optional<KvEvent> read_event_array(EventCursor& cursor, std::uint64_t count) {
  if (count == 0) {
    cursor.fail("an event without a type");
    return std::nullopt;
  }
  const std::string_view type = cursor.next(EventItem::Kind::kText, "the type of an event").text();
  const EventFields fields = fields_of(type);
  EventFieldValues values;
  for (std::uint64_t i = 0; i + 1 < count && !cursor.failed(); ++i) {
    const bool known = i < fields.size();
    read_field(cursor, known ? field_named(fields[i]) : EventField::kOther, values);
  }
  return make_event(cursor, type, std::move(values));
}

/// The type comes first, as msgspec writes it and asks of what it reads.
std::optional<KvEvent> read_event_map(EventCursor& cursor, std::uint64_t count) {
  if (count == 0 || cursor.next(EventItem::Kind::kText, "a field's name").text() != "type") {
    cursor.fail("an event that does not begin with its type");
    return std::nullopt;
  }
  const std::string_view type = cursor.next(EventItem::Kind::kText, "the type of an event").text();
  const bool is_known = !fields_of(type).empty();
  EventFieldValues values;
  for (std::uint64_t i = 1; i < count && !cursor.failed(); ++i) {
    const std::string_view name = cursor.next(EventItem::Kind::kText, "a field's name").text();
    read_field(cursor, is_known ? field_named(name) : EventField::kOther, values);
  }
  return make_event(cursor, type, std::move(values));
}

std::optional<KvEvent> read_event(EventCursor& cursor) {
  const EventItem head = cursor.next();
  if (head.kind == EventItem::Kind::kArray) return read_event_array(cursor, head.number);
  if (head.kind == EventItem::Kind::kMap) return read_event_map(cursor, head.number);
  cursor.fail("an event that is neither a map nor an array");
  return std::nullopt;
}

}  // namespace

Result<KvEventBatch> decode_kv_events(std::span<const std::uint8_t> bytes) {
  EventCursor cursor(bytes);
  KvEventBatch batch;
  const EventItem outer = cursor.next(EventItem::Kind::kArray, "a batch");
  if (!cursor.failed() && outer.number < 2) cursor.fail("a batch without events");
  const EventItem time = cursor.next();
  using Kind = EventItem::Kind;
  if (time.kind != Kind::kFloat && time.kind != Kind::kUint && time.kind != Kind::kNegative) {
    cursor.fail("a time that is no number");
  }
  batch.time = time.real;
  const EventItem events = cursor.next(Kind::kArray, "the events");
  for (std::uint64_t i = 0; i < events.number && !cursor.failed(); ++i) {
    if (auto event = read_event(cursor)) batch.events.push_back(std::move(*event));
  }
  if (!cursor.failed()) cursor.skip(outer.number - 2);
  if (!cursor.failed() && !cursor.at_end()) cursor.fail("bytes are left over");
  if (cursor.failed()) {
    return KVFERRY_ERROR(kProtocol, "malformed batch of KV events: {}", cursor.reason());
  }
  return batch;
}

}  // namespace kvferry::ipc
