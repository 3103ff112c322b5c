// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/lease/words.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <cstdint>

/// Writers and readers of the segments drawn in words.hpp.
namespace kvferry::ipc::lease {

/// The owner's segment, in the owner. @threading one writer: the lease thread.
class OwnerWords {
 public:
  [[nodiscard]] static Result<OwnerWords> create(SessionId session);
  [[nodiscard]] words::OwnerState state() const noexcept { return state_; }
  /// @pre words::can_move(state(), to): anything else aborts.
  void move(words::OwnerState to);
  [[nodiscard]] int fd() const noexcept { return memory_.fd.get(); }

 private:
  explicit OwnerWords(SharedMemory::SingleWriter memory) : memory_(std::move(memory)) {}
  SharedMemory::SingleWriter memory_;
  words::OwnerState state_;
};

/// The owner's segment, in an attacher.
class OwnerWordsView {
 public:
  /// kProtocol: wrong size, seals, magic or nonce.
  [[nodiscard]] static Result<OwnerWordsView> map(const UniqueFd& fd, SessionId session);
  /// kProtocol for a word that names no phase.
  [[nodiscard]] Result<words::OwnerState> load() const;

 private:
  explicit OwnerWordsView(SharedMapping mapping) : mapping_(std::move(mapping)) {}
  SharedMapping mapping_;
};

/// An attacher's segment, in the attacher. @threading one writer: the lease thread.
class AttacherWords {
 public:
  [[nodiscard]] static Result<AttacherWords> create(IncarnationId incarnation);
  /// Call strictly after the last close of the lease's memory. Never goes back.
  void release_up_to(LeaseId lease);
  /// Call strictly after the zeroing of the lease's epoch was observed complete. Never goes back.
  void set_prepared(LeaseId lease);
  void set_attached(LeaseId lease) noexcept;
  void beat() noexcept;
  [[nodiscard]] LeaseId released() const noexcept { return released_; }
  [[nodiscard]] int fd() const noexcept { return memory_.fd.get(); }

 private:
  explicit AttacherWords(SharedMemory::SingleWriter memory) : memory_(std::move(memory)) {}
  SharedMemory::SingleWriter memory_;
  LeaseId released_;
  LeaseId prepared_;
};

/// An attacher's segment, in the owner.
class AttacherWordsView {
 public:
  [[nodiscard]] static Result<AttacherWordsView> map(const UniqueFd& fd, IncarnationId incarnation);
  [[nodiscard]] LeaseId released() const noexcept;
  [[nodiscard]] LeaseId prepared() const noexcept;

 private:
  explicit AttacherWordsView(SharedMapping mapping) : mapping_(std::move(mapping)) {}
  SharedMapping mapping_;
};

}  // namespace kvferry::ipc::lease
