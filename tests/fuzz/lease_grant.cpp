// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A grant in several parts, as an attacher puts it together: each with its length, its number of
// descriptors and its body. A whole grant must fit the attacher's own geometry.
#include "fuzz.hpp"
#include "lease/grant_assembly.hpp"
#include "support/lease_geometry.hpp"

#include <fcntl.h>

namespace kvferry::fuzz {
namespace {

ipc::lease::Incoming next_part(Input& input) {
  ipc::lease::Incoming incoming;
  incoming.message = ipc::lease::LeaseMessage::kGrant;
  incoming.version = ipc::kLeaseProtocolVersion;
  const std::size_t length = input.number(2);
  for (int fds = input.byte() % 8; fds > 0; --fds) {
    incoming.packet.fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  const auto body = input.take(length);
  incoming.packet.bytes.resize(ipc::lease::kHeaderBytes);
  incoming.packet.bytes.insert(incoming.packet.bytes.end(), body.begin(), body.end());
  return incoming;
}

// What the attacher does with it next, up to the device.
void check(const ipc::lease::Grant& grant, const ipc::Geometry& geometry) {
  KVFERRY_CHECK(grant.layout.validate(geometry).has_value(), "a grant with a layout of no use");
  KVFERRY_CHECK(grant.handles.size() == grant.layout.segment_bytes.size(), "handles are missing");
  for (std::size_t i = 0; i < grant.handles.size(); ++i) {
    KVFERRY_CHECK(grant.handles[i].size_bytes >= grant.layout.segment_bytes[i], "a short segment");
  }
  for (const ipc::ByteRange& range : grant.layout.covered_ranges()) {
    const std::uint64_t segment = grant.layout.segment_bytes.at(range.segment);
    KVFERRY_CHECK(range.size_bytes <= segment && range.offset <= segment - range.size_bytes,
                  "a range outside its segment");
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const ipc::Geometry geometry = test::small_geometry(2, 1);
  fuzz::Input input(data, size);
  const bool legacy = input.byte() % 2 == 1;
  ipc::lease::GrantAssembly assembly(geometry,
                                     legacy ? ipc::HandleKind::kLegacy : ipc::HandleKind::kVmm);
  while (!input.empty()) {
    const auto grant = assembly.add(fuzz::next_part(input));
    if (!grant) break;  // The owner would be dropped.
    if (grant->has_value()) fuzz::check(**grant, geometry);
  }
  return 0;
}
