// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kvferry::ipc {

/// A mapped range of a memfd (Boost.Interprocess mapped_region inside).
/// @lifetime unmapped by the destructor.
class SharedMapping {
 public:
  SharedMapping() noexcept;
  SharedMapping(SharedMapping&&) noexcept;
  SharedMapping& operator=(SharedMapping&&) noexcept;
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();
  [[nodiscard]] std::byte* data() const noexcept;
  [[nodiscard]] std::size_t size_bytes() const noexcept;

 private:
  friend class SharedMemory;
  struct State;
  std::unique_ptr<State> state_;
};

/// Anonymous shared memory (memfd, O_CLOEXEC): no name to leak, gone with its last holder.
class SharedMemory {
 public:
  /// A segment that only its creator can write: mapped by the creator, then sealed against growing,
  /// shrinking and further writable mappings.
  struct SingleWriter {
    UniqueFd fd;
    SharedMapping mapping;
  };
  [[nodiscard]] static Result<SingleWriter> create_single_writer(const std::string& name,
                                                                 std::size_t size_bytes);
  /// Maps a peer's single-writer segment read-only after checking size and seals (a segment that
  /// could shrink would fault us): kProtocol otherwise.
  [[nodiscard]] static Result<SharedMapping> map_single_writer(const UniqueFd& fd,
                                                               std::size_t size_bytes);

  /// A pool that several processes write: sealed against growing and shrinking. Memory is really
  /// there on return (kNoHostMemory otherwise) when reserve is true. That takes long for a large
  /// pool: give_up is asked every few hundredths of a second, and true ends it as kCancelled.
  [[nodiscard]] static Result<UniqueFd> create_pool(const std::string& name,
                                                    std::uint64_t size_bytes,
                                                    bool reserve,
                                                    const std::function<bool()>& give_up = {});
  /// The same without its memory, which a PoolFiller gives it; kNoHostMemory at once when there is
  /// less than that. It is of huge pages when the machine has reserved enough of them, and they are
  /// wanted; is_of_huge_pages() says so.
  [[nodiscard]] static Result<UniqueFd> create_large_pool(const std::string& name,
                                                          std::uint64_t size_bytes,
                                                          bool wants_huge_pages);
  /// Whether a pool is of huge pages that the machine had reserved.
  [[nodiscard]] static bool is_of_huge_pages(const UniqueFd& fd) noexcept;
  /// Whether that would have its memory once so much is given back: kNoHostMemory otherwise.
  [[nodiscard]] static Status check_room(const std::string& name,
                                         std::uint64_t size_bytes,
                                         bool wants_huge_pages,
                                         std::uint64_t given_back);
  [[nodiscard]] static Result<SharedMapping> map_pool(const UniqueFd& fd, std::uint64_t size_bytes);
};

}  // namespace kvferry::ipc
