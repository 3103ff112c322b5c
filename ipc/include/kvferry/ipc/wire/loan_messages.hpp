// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Messages between a process that lends tensors in device memory and a worker that copies them, on
/// the lender's own socket (SEQPACKET: uid check, pidfd, descriptors). The borrower asks, the
/// lender answers each question with one packet. Part of what kWireVersion counts.
namespace kvferry::ipc {

enum class LoanStep : std::uint8_t {
  kTake = 1,  ///< Answered with the part that begins there.
  kReturn     ///< The borrower has let go of all that it mapped. Answered with an empty part.
};
constexpr std::uint64_t wire_max(LoanStep) { return static_cast<std::uint64_t>(LoanStep::kReturn); }

struct LoanRequest {
  std::uint32_t version = kWireVersion;
  LoanStep step = LoanStep::kTake;
  std::uint32_t first_allocation = 0;
  std::uint32_t first_tensor = 0;
  template <typename V> void visit(V& v) { v(version, step, first_allocation, first_tensor); }
};

/// A whole allocation of the lender; its descriptor, if it has one, comes with the packet, in this
/// order.
struct LentAllocation {
  HandleKind kind = HandleKind::kVmm;
  std::uint64_t size_bytes = 0;
  Bytes token;
  bool has_fd = false;
  template <typename V> void visit(V& v) { v(kind, size_bytes, token, has_fd); }
};

struct LentTensor {
  std::string name;
  std::string dtype;                 ///< As in safetensors files: "BF16".
  std::vector<std::uint64_t> shape;  ///< Row-major, without gaps.
  std::uint32_t allocation = 0;      ///< By its place among all allocations.
  std::uint64_t offset = 0;          ///< In its allocation.
  std::uint64_t size_bytes = 0;
  template <typename V> void visit(V& v) { v(name, dtype, shape, allocation, offset, size_bytes); }
};

/// Allocations from LoanRequest::first_allocation on, then tensors from first_tensor on: as many as
/// fit a packet, at least one while there are more.
struct LoanPart {
  static constexpr std::uint32_t kMaxAllocations = 65'536;
  static constexpr std::size_t kMaxTokenBytes = 256;
  static constexpr std::size_t kMaxNameBytes = 1024;
  std::uint32_t version = kWireVersion;
  std::uint32_t total_allocations = 0;
  std::uint32_t total_tensors = 0;
  std::vector<LentAllocation> allocations;
  std::vector<LentTensor> tensors;
  std::optional<Error> refused;  ///< Nothing is lent, and why.
  template <typename V> void visit(V& v) {
    v(version, total_allocations, total_tensors, allocations, tensors, refused);
  }
};

}  // namespace kvferry::ipc
