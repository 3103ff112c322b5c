// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Every message of the control plane, the registry and the step channel: decoded, then encoded and
// decoded again. The first byte says which one it is to be.
#include "support/wire_messages.hpp"

#include "fuzz.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <array>

namespace kvferry::fuzz {
namespace {

using Read = void (*)(std::span<const std::uint8_t>);

// As the manager does with a hello: what is valid can be measured.
void use(const ipc::Geometry& geometry) {
  if (!geometry.validate()) return;
  for (std::uint32_t group = 0; group < geometry.groups.size(); ++group) {
    (void)geometry.host_block_bytes(ipc::GroupId{group});
  }
  (void)geometry.fingerprint(ipc::ArenaOrder::kBlockFirst);
}

template <typename T> void read(std::span<const std::uint8_t> bytes) {
  const auto message = decode_and_check<T>(bytes);
  if constexpr (std::is_same_v<T, ipc::Geometry>) {
    if (message) use(*message);
  } else if constexpr (std::is_same_v<T, ipc::RankHello>) {
    if (message) use(message->geometry);
    if (message) (void)ipc::DeviceSpec::parse(message->device);
  }
}

template <typename... T> struct Readers {
  static constexpr std::array<Read, sizeof...(T)> kAll{&read<T>...};
};

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry::fuzz;
  Input input(data, size);
  constexpr auto& kReaders = kvferry::test::WireMessages<Readers>::kAll;
  kReaders[input.byte() % kReaders.size()](input.rest());
  return 0;
}
