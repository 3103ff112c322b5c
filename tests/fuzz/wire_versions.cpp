// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The messages that come before anything is known of the peer: a hello, a welcome and an envelope
// of any protocol version. Nothing of another version may get through, however it is written.
#include "fuzz.hpp"
#include "wire/registry.hpp"
#include "wire/wire_version.hpp"

namespace kvferry::fuzz {
namespace {

template <typename T> void check(const ipc::Result<T>& message) {
  if (!message) return;
  KVFERRY_CHECK(message->version == ipc::kWireVersion, "a message of another version");
  round_trip(*message);
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const std::span bytes(data, size);
  fuzz::check(ipc::read_registry_hello(bytes));
  fuzz::check(ipc::decode_versioned<ipc::RegistryWelcome>(bytes, "welcome", "the server"));
  fuzz::check(ipc::decode_versioned<ipc::Envelope>(bytes, "envelope", "the server"));
  return 0;
}
