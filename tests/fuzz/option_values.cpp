// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Texts of users: sizes, times, devices, digests and names. The first byte says which one. What is
// accepted and can be written must read the same again.
#include "fuzz.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"

namespace kvferry::fuzz {
namespace {

void read_device(std::string_view text) {
  const auto spec = ipc::DeviceSpec::parse(text);
  if (!spec) return;
  const auto again = ipc::DeviceSpec::parse(spec->to_string());
  KVFERRY_CHECK(again && again->to_string() == spec->to_string(), "another device");
}

void read_size(std::string_view text) {
  const auto size = ipc::parse_size(text);
  if (!size) return;
  KVFERRY_CHECK(*size > 0, "a size of nothing");
  (void)ipc::format_size(*size);
}

void read_digest(std::string_view text) {
  const auto digest = ipc::Digest::from_hex(text);
  if (!digest) return;
  const auto again = ipc::Digest::from_hex(digest->hex());
  KVFERRY_CHECK(again && *again == *digest, "another digest");
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const std::uint8_t choice = input.byte() % 6;
  const std::string_view text = input.text();
  switch (choice) {
    case 0: fuzz::read_size(text); break;
    case 1: fuzz::read_device(text); break;
    case 2: fuzz::read_digest(text); break;
    case 3: (void)ipc::parse_arena_order(text); break;
    case 4:
      if (const auto transition = ipc::parse_transition(text)) {
        KVFERRY_CHECK(ipc::to_string(*transition) == text, "another transition");
      }
      break;
    default:
      if (const auto dir = ipc::RuntimeDir::find("/nonexistent", text)) {
        KVFERRY_CHECK(false, "a directory that is not there");
      }
  }
  return 0;
}
