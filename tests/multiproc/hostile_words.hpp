// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/lease/words.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

/// What a process writes that passed its hello and means no good.
namespace kvferry::test {

inline void store_word(const ipc::SharedMapping& mapping, std::size_t offset, std::uint64_t value) {
  std::atomic_ref(*reinterpret_cast<std::uint64_t*>(mapping.data() + offset))
      .store(value, std::memory_order_release);
}

inline std::uint64_t load_word(const ipc::SharedMapping& mapping, std::size_t offset) {
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(mapping.data() + offset))
      .load(std::memory_order_acquire);
}

/// A segment of shared words with a valid beginning, to be written to by hand.
inline ipc::SharedMemory::SingleWriter make_words(std::size_t bytes,
                                                  std::uint32_t magic,
                                                  const ipc::Digest& nonce) {
  auto segment = ipc::SharedMemory::create_single_writer("hostile", bytes);
  if (!segment) throw ipc::Exception(segment.error());
  store_word(segment->mapping, ipc::words::kNonceHighOffset, nonce.high());
  store_word(segment->mapping, ipc::words::kNonceLowOffset, nonce.low());
  store_word(segment->mapping, ipc::words::kPublishedOffset, ipc::words::published_value(magic));
  return std::move(segment).value();
}

/// Every way to change somebody else's segment, tried: which of them worked.
inline std::string try_to_write(const ipc::UniqueFd& fd) {
  std::string open;
  struct stat before {};
  if (::fstat(fd.get(), &before) != 0) return "no segment";
  const auto size = static_cast<std::size_t>(before.st_size);
  const auto try_map = [&](int which, const char* how) {
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, which, 0);
    if (memory == MAP_FAILED) return;
    open += fmt::format("mapped {}; ", how);
    (void)::munmap(memory, size);
  };
  try_map(fd.get(), "as it came");
  const std::string name = fmt::format("/proc/self/fd/{}", fd.get());
  if (const ipc::UniqueFd again(::open(name.c_str(), O_RDWR | O_CLOEXEC)); again.valid()) {
    try_map(again.get(), "as opened again");
  }
  const std::uint64_t word = UINT64_MAX;
  if (::pwrite(fd.get(), &word, sizeof(word), ipc::words::kLineBytes) > 0) open += "written; ";
  if (::ftruncate(fd.get(), 0) == 0) open += "shrunk; ";
  if (::ftruncate(fd.get(), 1 << 20) == 0) open += "grown; ";
  if (::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, before.st_size) == 0) {
    open += "emptied; ";
  }
  if (void* const readable = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
      readable != MAP_FAILED) {
    if (::mprotect(readable, size, PROT_READ | PROT_WRITE) == 0) open += "made writable; ";
    (void)::munmap(readable, size);
  }
  return open;
}

/// Writes garbage into words and rings, each time another.
class Scribbler {
 public:
  explicit Scribbler(std::uint64_t seed) : random_(seed) {}
  Scribbler(const Scribbler&) = delete;
  Scribbler& operator=(const Scribbler&) = delete;
  ~Scribbler() {
    if (ring_ != nullptr) (void)::munmap(ring_, ring_bytes_);
  }

  /// The ring of transitions that this process has begun, from now on garbage as well.
  void add_ring(const std::filesystem::path& folder) {
    const std::string mine = fmt::format(".{}.", ::getpid());
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().filename().native().find(mine) == std::string::npos) continue;
      const ipc::UniqueFd fd(::open(entry.path().c_str(), O_RDWR | O_CLOEXEC));
      ring_bytes_ = std::filesystem::file_size(entry.path());
      ring_ = ::mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
      if (ring_ == MAP_FAILED) ring_ = nullptr;
    }
    if (ring_ == nullptr) throw ipc::Exception(KVFERRY_ERROR(kNotFound, "no ring of {}", mine));
  }
  /// Small numbers that could be leases and epochs, or anything.
  void set_plausible(bool plausible) { plausible_ = plausible; }

  void scribble(const ipc::SharedMapping& mapping, int times) {
    const std::size_t words = mapping.size_bytes() / sizeof(std::uint64_t);
    for (int i = 0; i < times; ++i) {
      store_word(mapping, number(words) * sizeof(std::uint64_t), value());
      if (i % 16 != 0) continue;
      auto* ring = static_cast<std::uint64_t*>(ring_);
      std::atomic_ref(ring[number(ring_bytes_ / sizeof(std::uint64_t))])
          .store(value(), std::memory_order_relaxed);
    }
  }
  /// A packet of the lease socket: any bytes, or a good header with any body.
  std::vector<std::uint8_t> packet() {
    std::vector<std::uint8_t> bytes(1 + number(300));
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random_());
    if (bytes.size() > 8 && number(2) == 0) {
      const std::uint32_t version = ipc::kLeaseProtocolVersion;
      bytes[0] = static_cast<std::uint8_t>(1 + number(9));
      bytes[1] = bytes[2] = bytes[3] = 0;
      for (unsigned i = 0; i < 4; ++i) bytes[4 + i] = static_cast<std::uint8_t>(version >> (8 * i));
    }
    return bytes;
  }
  std::uint64_t number(std::uint64_t below) { return random_() % below; }

 private:
  std::uint64_t value() {
    if (!plausible_) return random_();
    // A lease, or an epoch with a phase, next to the real ones.
    return number(2) == 0 ? number(6) : number(4) << ipc::words::kPhaseBits | number(8);
  }

  std::mt19937_64 random_;
  bool plausible_ = false;
  void* ring_ = nullptr;
  std::size_t ring_bytes_ = 0;
};

}  // namespace kvferry::test
