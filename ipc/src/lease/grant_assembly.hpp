// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "lease/lease_messages.hpp"

#include <optional>
#include <vector>

namespace kvferry::ipc::lease {

/// A whole grant, checked against the geometry.
struct Grant {
  Epoch epoch;
  LeaseId lease;
  std::optional<LeaseId> prepared;  ///< As in GrantBody.
  ArenaLayout layout;
  std::vector<ExportedHandle> handles;
};

/// Puts a grant together from its parts. Everything in them is untrusted: counts, sizes, kinds,
/// order, descriptors, and the layout against this side's geometry.
class GrantAssembly {
 public:
  GrantAssembly(const Geometry& geometry, HandleKind handles)
      : geometry_(geometry), handles_(handles) {}

  /// The whole grant with its last part, nothing before. kProtocol or kGeometryMismatch: the sender
  /// is to be dropped; what was gathered is closed.
  [[nodiscard]] Result<std::optional<Grant>> add(Incoming incoming);
  void reset() { pending_.reset(); }

 private:
  Result<std::optional<Grant>> add_part(Incoming incoming);
  [[nodiscard]] Status begin(const GrantBody& part);
  [[nodiscard]] Status check_part(const GrantBody& part) const;
  [[nodiscard]] Status check_handle(const WireHandle& handle, std::size_t index) const;

  const Geometry& geometry_;
  HandleKind handles_;
  std::optional<Grant> pending_;
};

}  // namespace kvferry::ipc::lease
