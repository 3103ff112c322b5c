// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/kv_events.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <optional>

namespace kvferry::ipc {
namespace {

/// msgpack as msgspec writes it: every number and length in its shortest form, and floats always as
/// floats.
class EventWriter {
 public:
  void begin_array(std::size_t count) { put_length(count, kFixArray, 16, {0, kArray16, kArray32}); }
  void begin_map(std::size_t count) { put_length(count, kFixMap, 16, {0, kMap16, kMap32}); }
  void put_nil() { bytes_.push_back(kNil); }
  void put(double value) {
    bytes_.push_back(kFloat64);
    put_big_endian(std::bit_cast<std::uint64_t>(value), 8);
  }
  void put(std::uint32_t value) {
    if (value < 0x80) {
      put_big_endian(value, 1);
    } else if (value <= std::numeric_limits<std::uint8_t>::max()) {
      put_big_endian(std::uint64_t{kUint8} << 8U | value, 2);
    } else if (value <= std::numeric_limits<std::uint16_t>::max()) {
      put_big_endian(std::uint64_t{kUint16} << 16U | value, 3);
    } else {
      put_big_endian(std::uint64_t{kUint32} << 32U | value, 5);
    }
  }
  void put(std::string_view text) {
    put_length(text.size(), kFixText, 32, {kText8, kText16, kText32});
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  void put(const Digest& hash) {
    bytes_.push_back(kBytes8);
    bytes_.push_back(sizeof(hash.bytes));
    bytes_.insert(bytes_.end(), hash.bytes.begin(), hash.bytes.end());
  }
  void put(const std::vector<Digest>& hashes) {
    begin_array(hashes.size());
    for (const Digest& hash : hashes) put(hash);
  }
  void reserve(std::size_t size) { bytes_.reserve(size); }
  [[nodiscard]] Bytes take() { return std::move(bytes_); }

 private:
  static constexpr std::uint8_t kFixMap = 0x80;
  static constexpr std::uint8_t kFixArray = 0x90;
  static constexpr std::uint8_t kFixText = 0xa0;
  static constexpr std::uint8_t kNil = 0xc0;
  static constexpr std::uint8_t kBytes8 = 0xc4;
  static constexpr std::uint8_t kFloat64 = 0xcb;
  static constexpr std::uint8_t kUint8 = 0xcc;
  static constexpr std::uint8_t kUint16 = 0xcd;
  static constexpr std::uint8_t kUint32 = 0xce;
  static constexpr std::uint8_t kText8 = 0xd9;
  static constexpr std::uint8_t kText16 = 0xda;
  static constexpr std::uint8_t kText32 = 0xdb;
  static constexpr std::uint8_t kArray16 = 0xdc;
  static constexpr std::uint8_t kArray32 = 0xdd;
  static constexpr std::uint8_t kMap16 = 0xde;
  static constexpr std::uint8_t kMap32 = 0xdf;

  /// heads: of lengths of 1, 2 and 4 bytes; 0 where there is none of that.
  void put_length(std::size_t length,
                  std::uint8_t fix,
                  std::size_t fix_end,
                  const std::array<std::uint8_t, 3>& heads) {
    KVFERRY_CHECK(length <= kMaxWireElements, fmt::format("{} elements in an event", length));
    if (length < fix_end) {
      put_big_endian(fix | length, 1);
    } else if (heads[0] != 0 && length <= std::numeric_limits<std::uint8_t>::max()) {
      put_big_endian(std::uint64_t{heads[0]} << 8U | length, 2);
    } else if (length <= std::numeric_limits<std::uint16_t>::max()) {
      put_big_endian(std::uint64_t{heads[1]} << 16U | length, 3);
    } else {
      put_big_endian(std::uint64_t{heads[2]} << 32U | length, 5);
    }
  }
  void put_big_endian(std::uint64_t value, unsigned size) {
    for (unsigned byte = size; byte-- > 0;) {
      bytes_.push_back(static_cast<std::uint8_t>(value >> (8 * byte)));
    }
  }

  Bytes bytes_;
};

/// Writes an event's fields one after the other: with their names, or by position.
class FieldWriter {
 public:
  FieldWriter(EventWriter& out, KvEventEncoding encoding, std::string_view type, std::size_t fields)
      : out_(out), named_(encoding == KvEventEncoding::kMaps) {
    if (named_) {
      out_.begin_map(fields + 1);
    } else {
      out_.begin_array(fields + 1);
    }
    name("type");
    out_.put(type);
  }
  template <typename T> void put(std::string_view field, const T& value) {
    name(field);
    out_.put(value);
  }
  void put_nil(std::string_view field) {
    name(field);
    out_.put_nil();
  }
  void put_no_tokens() {
    name("token_ids");
    out_.begin_array(0);
  }

 private:
  void name(std::string_view field) {
    if (named_) out_.put(field);
  }

  EventWriter& out_;
  bool named_;
};

// vLLM leaves out what has its default value: in a map anywhere, in an array at the end alone. So
// extra_keys, which is before the group, is there in arrays only.
void write_event(EventWriter& out, KvEventEncoding encoding, const KvStored& event) {
  const bool has_kind = !event.group_kind.empty();
  const bool has_window = has_kind && event.window_tokens != 0;
  const bool has_extra = encoding == KvEventEncoding::kArrays;
  constexpr std::size_t kAlways = 8;
  FieldWriter fields(
      out, encoding, "BlockStored",
      kAlways + (has_extra ? 1U : 0U) + (has_kind ? 1U : 0U) + (has_window ? 1U : 0U));
  fields.put("block_hashes", event.hashes);
  if (event.before.is_zero()) {
    fields.put_nil("parent_block_hash");
  } else {
    fields.put("parent_block_hash", event.before);
  }
  fields.put_no_tokens();
  fields.put("block_size", event.tokens_per_block);
  fields.put_nil("lora_id");
  fields.put("medium", kKvMedium);
  fields.put_nil("lora_name");
  if (has_extra) fields.put_nil("extra_keys");
  fields.put("group_idx", event.group.value);
  if (has_kind) fields.put("kv_cache_spec_kind", std::string_view(event.group_kind));
  if (has_window) fields.put("kv_cache_spec_sliding_window", event.window_tokens);
}

void write_event(EventWriter& out, KvEventEncoding encoding, const KvRemoved& event) {
  FieldWriter fields(out, encoding, "BlockRemoved", 3);
  fields.put("block_hashes", event.hashes);
  fields.put("medium", kKvMedium);
  fields.put("group_idx", event.group.value);
}

void write_event(EventWriter& out, KvEventEncoding encoding, const KvCleared& /*event*/) {
  const FieldWriter fields(out, encoding, "AllBlocksCleared", 0);
}

std::size_t likely_size(const KvEventBatch& batch) {
  constexpr std::size_t kHashBytes = 18;
  constexpr std::size_t kEventBytes = 256;
  std::size_t size = 32;
  for (const KvEvent& event : batch.events) {
    size += kEventBytes;
    if (const auto* stored = std::get_if<KvStored>(&event)) {
      size += stored->hashes.size() * kHashBytes;
    } else if (const auto* removed = std::get_if<KvRemoved>(&event)) {
      size += removed->hashes.size() * kHashBytes;
    }
  }
  return size;
}

// ---- topics and endpoints ----

constexpr std::string_view kTopicBegin = "kv@";

std::string escape_topic_part(std::string_view text) {
  std::string escaped;
  for (const char letter : text) {
    const bool is_plain =
        letter > ' ' && letter <= '~' && letter != '%' && letter != '/' && letter != '@';
    if (is_plain) {
      escaped += letter;
    } else {
      escaped += fmt::format("%{:02X}", static_cast<unsigned>(static_cast<unsigned char>(letter)));
    }
  }
  return escaped;
}

std::optional<unsigned> hex_digit(char letter) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  const std::size_t at = kDigits.find(letter);
  if (at == std::string_view::npos) return std::nullopt;
  return static_cast<unsigned>(at);
}

std::optional<std::string> unescape_topic_part(std::string_view text) {
  std::string plain;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '%') {
      plain += text[at];
      continue;
    }
    if (at + 2 >= text.size()) return std::nullopt;
    const auto high = hex_digit(text[at + 1]);
    const auto low = hex_digit(text[at + 2]);
    if (!high || !low) return std::nullopt;
    plain += static_cast<char>(*high << 4U | *low);
    at += 2;
  }
  return plain;
}

}  // namespace

Bytes encode_kv_events(const KvEventBatch& batch, KvEventEncoding encoding) {
  EventWriter out;
  out.reserve(likely_size(batch));
  out.begin_array(2);
  out.put(batch.time);
  out.begin_array(batch.events.size());
  for (const KvEvent& event : batch.events) {
    std::visit([&](const auto& one) { write_event(out, encoding, one); }, event);
  }
  return out.take();
}

std::string KvTopic::text() const {
  return fmt::format("{}{}/{}/{}@{}", kTopicBegin, escape_topic_part(engine),
                     escape_topic_part(name_space), root.hex(), escape_topic_part(model));
}

Result<KvTopic> KvTopic::parse(std::string_view text) {
  const Error refused =
      KVFERRY_ERROR(kProtocol, "topic \"{}\" is no kv@ENGINE/NAMESPACE/ROOT@MODEL",
                    escape_topic_part(text.substr(0, 256)));
  if (!text.starts_with(kTopicBegin)) return refused;
  const std::string_view rest = text.substr(kTopicBegin.size());
  const std::size_t first = rest.find('/');
  const std::size_t second = first == std::string_view::npos ? first : rest.find('/', first + 1);
  const std::size_t third = second == std::string_view::npos ? second : rest.find('@', second + 1);
  if (third == std::string_view::npos) return refused;
  auto engine = unescape_topic_part(rest.substr(0, first));
  auto name_space = unescape_topic_part(rest.substr(first + 1, second - first - 1));
  const auto root = Digest::from_hex(rest.substr(second + 1, third - second - 1));
  auto model = unescape_topic_part(rest.substr(third + 1));
  if (!engine || !name_space || !root || !model) return refused;
  return KvTopic{std::move(*engine), std::move(*name_space), *root, std::move(*model)};
}

}  // namespace kvferry::ipc
