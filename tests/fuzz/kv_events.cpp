// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Batches and topics of KV events, as any publisher may send them. The first byte says which.
#include "kvferry/ipc/wire/kv_events.hpp"

#include "fuzz.hpp"

namespace kvferry::fuzz {
namespace {

// What was read can be told, and is read as the same again.
void read_batch(std::span<const std::uint8_t> bytes) {
  const auto batch = ipc::decode_kv_events(bytes);
  if (!batch) return;
  for (const auto encoding : {ipc::KvEventEncoding::kMaps, ipc::KvEventEncoding::kArrays}) {
    const ipc::Bytes told = ipc::encode_kv_events(*batch, encoding);
    const auto again = ipc::decode_kv_events(told);
    KVFERRY_CHECK(again.has_value(), again ? "" : again.error().to_string());
    KVFERRY_CHECK(ipc::encode_kv_events(*again, encoding) == told, "another batch");
  }
}

void read_topic(std::string_view text) {
  const auto topic = ipc::KvTopic::parse(text);
  if (!topic) return;
  const auto again = ipc::KvTopic::parse(topic->text());
  KVFERRY_CHECK(again.has_value() && *again == *topic, "another topic");
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry::fuzz;
  Input input(data, size);
  if (input.byte() % 4 == 3) {
    read_topic(input.text());
  } else {
    read_batch(input.rest());
  }
  return 0;
}
