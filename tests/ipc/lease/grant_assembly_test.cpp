// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/grant_assembly.hpp"

#include "support/lease_geometry.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>

namespace kvferry::ipc {
namespace {

using lease::Grant;
using lease::GrantBody;
using lease::Incoming;
using lease::LeaseMessage;

class GrantAssemblyTest : public ::testing::Test {
 protected:
  // The good grant of a layout with four segments, in two parts.
  GrantBody part(std::uint32_t first, std::uint32_t count) const {
    GrantBody body;
    body.epoch = Epoch{3};
    body.lease = LeaseId{9};
    body.prepared = LeaseId{4};
    body.total = static_cast<std::uint32_t>(layout_.segment_bytes.size());
    body.first = first;
    for (std::uint32_t i = first; i < first + count; ++i) {
      body.handles.push_back({HandleKind::kVmm, layout_.segment_bytes[i], {}, true});
    }
    if (first == 0) body.layout = layout_;
    return body;
  }

  static Incoming packed(const GrantBody& body, std::size_t fds) {
    Incoming incoming;
    incoming.message = LeaseMessage::kGrant;
    incoming.version = kLeaseProtocolVersion;
    incoming.packet.bytes.assign(lease::kHeaderBytes, 0);
    const Bytes encoded = encode(body);
    incoming.packet.bytes.insert(incoming.packet.bytes.end(), encoded.begin(), encoded.end());
    for (std::size_t i = 0; i < fds; ++i) {
      incoming.packet.fds.emplace_back(::memfd_create("handle", MFD_CLOEXEC));
    }
    return incoming;
  }

  // The first part with one thing changed must be refused.
  ErrorCode code_of(const std::function<void(GrantBody&)>& change, std::size_t fds = 2) {
    GrantBody body = part(0, 2);
    change(body);
    lease::GrantAssembly sut(geometry_, HandleKind::kVmm);
    const auto result = sut.add(packed(body, fds));
    EXPECT_FALSE(result.has_value()) << "accepted";
    return result ? ErrorCode::kCancelled : result.error().code;
  }

  Geometry geometry_ = test::small_geometry(2, 1);
  ArenaLayout layout_ = test::small_layout(geometry_, ArenaOrder::kLayerFirstMany);
};

TEST_F(GrantAssemblyTest, PartsInOrderMakeTheWholeGrant) {
  ASSERT_EQ(layout_.segment_bytes.size(), 4U);
  lease::GrantAssembly sut(geometry_, HandleKind::kVmm);
  auto first = sut.add(packed(part(0, 2), 2));
  ASSERT_TRUE(first);
  EXPECT_FALSE(first->has_value());
  auto second = sut.add(packed(part(2, 2), 2));
  ASSERT_TRUE(second) << second.error().to_string();
  ASSERT_TRUE(second->has_value());
  EXPECT_EQ((*second)->epoch, Epoch{3});
  EXPECT_EQ((*second)->lease, LeaseId{9});
  EXPECT_EQ((*second)->prepared, LeaseId{4});
  EXPECT_EQ((*second)->handles.size(), 4U);
  EXPECT_EQ((*second)->layout, layout_);
}

TEST_F(GrantAssemblyTest, EveryWrongFieldIsRefused) {
  using B = GrantBody;
  EXPECT_EQ(code_of([](B& b) { b.lease = LeaseId{0}; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.prepared = b.lease; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.epoch = Epoch{0}; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.epoch = Epoch{UINT64_MAX}; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.total = 3; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.total = UINT32_MAX; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.first = 1; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.layout.reset(); }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles.clear(); }, 0), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles.resize(5, b.handles[0]); }, 5), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles[1].kind = HandleKind::kLegacy; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles[1].size_bytes -= 1; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles[1].has_fd = false; }), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](B& b) { b.handles[1].token.resize(257); }), ErrorCode::kProtocol);
}

TEST_F(GrantAssemblyTest, DescriptorsMustMatchTheHandles) {
  EXPECT_EQ(code_of([](GrantBody&) {}, 1), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](GrantBody&) {}, 3), ErrorCode::kProtocol);
  EXPECT_EQ(code_of([](GrantBody&) {}, 0), ErrorCode::kProtocol);
}

TEST_F(GrantAssemblyTest, LayoutOfAnotherGeometryIsRefused) {
  const Geometry other = test::small_geometry(3, 1);
  GrantBody body = part(0, 2);
  body.layout = test::small_layout(other, ArenaOrder::kLayerFirstMany);
  body.total = 6;
  lease::GrantAssembly sut(geometry_, HandleKind::kVmm);
  EXPECT_FALSE(sut.add(packed(body, 2)));
}

TEST_F(GrantAssemblyTest, PartsOfAnotherLeaseOrOutOfOrderAreRefused) {
  const std::function<void(GrantBody&)> changes[] = {
      [](GrantBody& b) { b.lease = LeaseId{10}; }, [](GrantBody& b) { b.epoch = Epoch{4}; },
      [](GrantBody& b) { b.prepared.reset(); },    [](GrantBody& b) { b.first = 3; },
      [this](GrantBody& b) { b = part(0, 2); },
  };
  for (const auto& change : changes) {
    lease::GrantAssembly sut(geometry_, HandleKind::kVmm);
    ASSERT_TRUE(sut.add(packed(part(0, 2), 2)));
    GrantBody second = part(2, 2);
    change(second);
    const auto result = sut.add(packed(second, 2));
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kProtocol);
  }
}

TEST_F(GrantAssemblyTest, EveryTruncationIsRefused) {
  const Incoming whole = packed(part(0, 2), 0);
  for (std::size_t size = lease::kHeaderBytes; size < whole.packet.bytes.size(); ++size) {
    Incoming cut = packed(part(0, 2), 2);
    cut.packet.bytes.resize(size);
    lease::GrantAssembly sut(geometry_, HandleKind::kVmm);
    const auto result = sut.add(std::move(cut));
    ASSERT_FALSE(result) << "accepted with " << size << " bytes";
    EXPECT_EQ(result.error().code, ErrorCode::kProtocol);
  }
}

TEST(LeaseHeaderTest, ShortUnknownAndForeignPacketsAreRefused) {
  const auto header = [](std::uint8_t message, std::uint8_t version, std::size_t size) {
    Packet packet;
    packet.bytes = {message, 0, 0, 0, version, 0, 0, 0};
    packet.bytes.resize(size);
    return packet;
  };
  EXPECT_FALSE(lease::read_header(header(1, 2, 7)));
  EXPECT_FALSE(lease::read_header(header(0, 2, 8)));
  EXPECT_TRUE(lease::read_header(header(9, 2, 8)));
  EXPECT_FALSE(lease::read_header(header(10, 2, 8)));
  EXPECT_FALSE(lease::read_header(header(5, 1, 8)));
  // These two must be readable in every version, or nobody could say what is wrong.
  EXPECT_TRUE(lease::read_header(header(1, 1, 8)));
  EXPECT_TRUE(lease::read_header(header(3, 1, 8)));
}

}  // namespace
}  // namespace kvferry::ipc
