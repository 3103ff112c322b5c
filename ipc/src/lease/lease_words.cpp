// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "lease/lease_words.hpp"

#include <atomic>

namespace kvferry::ipc::lease {
namespace {

std::atomic_ref<std::uint64_t> word(const SharedMapping& mapping, std::size_t offset) {
  KVFERRY_CHECK(offset + sizeof(std::uint64_t) <= mapping.size_bytes(), "word outside its segment");
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the byte map of words.hpp.
  return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(mapping.data() + offset));
}

// Everything else is zero already; who sees the published word sees the nonce before it.
void publish(const SharedMapping& mapping, std::uint32_t magic, const Digest& nonce) {
  word(mapping, words::kNonceHighOffset).store(nonce.high(), std::memory_order_relaxed);
  word(mapping, words::kNonceLowOffset).store(nonce.low(), std::memory_order_relaxed);
  // Pairs with the acquire load in check_published().
  word(mapping, words::kPublishedOffset)
      .store(words::published_value(magic), std::memory_order_release);
}

Status check_published(const SharedMapping& mapping, std::uint32_t magic, const Digest& nonce) {
  const std::uint64_t published =
      word(mapping, words::kPublishedOffset).load(std::memory_order_acquire);
  if (published != words::published_value(magic)) {
    return KVFERRY_ERROR(kProtocol, "lease words publish {:#x}, expected {:#x}", published,
                         words::published_value(magic));
  }
  const Digest found =
      Digest::from_words(word(mapping, words::kNonceHighOffset).load(std::memory_order_relaxed),
                         word(mapping, words::kNonceLowOffset).load(std::memory_order_relaxed));
  if (found != nonce) {
    return KVFERRY_ERROR(kProtocol, "lease words carry nonce {}, the peer said {}", found.hex(),
                         nonce.hex());
  }
  return ok();
}

}  // namespace

Result<OwnerWords> OwnerWords::create(SessionId session) {
  KVFERRY_ASSIGN(
      SharedMemory::SingleWriter memory,
      SharedMemory::create_single_writer("kvferry-lease-owner", words::kOwnerSegmentBytes));
  publish(memory.mapping, words::kOwnerMagic, session);
  return OwnerWords(std::move(memory));
}

void OwnerWords::move(words::OwnerState to) {
  KVFERRY_CHECK(words::can_move(state_, to),
                fmt::format("owner word: epoch {} {} cannot become epoch {} {}", state_.epoch.value,
                            to_string(state_.phase), to.epoch.value, to_string(to.phase)));
  state_ = to;
  // Pairs with the acquire load in OwnerWordsView::load().
  word(memory_.mapping, words::kOwnerWordOffset).store(words::pack(to), std::memory_order_release);
}

Result<OwnerWordsView> OwnerWordsView::map(const UniqueFd& fd, SessionId session) {
  KVFERRY_ASSIGN(SharedMapping mapping,
                 SharedMemory::map_single_writer(fd, words::kOwnerSegmentBytes));
  KVFERRY_TRY(check_published(mapping, words::kOwnerMagic, session));
  return OwnerWordsView(std::move(mapping));
}

Result<words::OwnerState> OwnerWordsView::load() const {
  // Pairs with the release store in OwnerWords::move().
  const std::uint64_t value =
      word(mapping_, words::kOwnerWordOffset).load(std::memory_order_acquire);
  words::OwnerState state;
  if (!words::unpack(value, state)) {
    return KVFERRY_ERROR(kProtocol, "owner word {:#x} names no phase", value);
  }
  return state;
}

Result<AttacherWords> AttacherWords::create(IncarnationId incarnation) {
  KVFERRY_ASSIGN(
      SharedMemory::SingleWriter memory,
      SharedMemory::create_single_writer("kvferry-lease-attacher", words::kAttacherSegmentBytes));
  publish(memory.mapping, words::kAttacherMagic, incarnation);
  return AttacherWords(std::move(memory));
}

void AttacherWords::release_up_to(LeaseId lease) {
  KVFERRY_CHECK(lease >= released_, fmt::format("released word would go back from {} to {}",
                                                released_.value, lease.value));
  released_ = lease;
  // Pairs with the acquire load in AttacherWordsView::released(): the owner that sees it frees.
  word(memory_.mapping, words::kReleasedOffset).store(lease.value, std::memory_order_release);
}

void AttacherWords::set_prepared(LeaseId lease) {
  KVFERRY_CHECK(lease > prepared_,
                fmt::format("prepared word would go from {} to {}", prepared_.value, lease.value));
  prepared_ = lease;
  // Pairs with the acquire load in AttacherWordsView::prepared(): who sees it hands the epoch on
  // without zeroing it again.
  word(memory_.mapping, words::kPreparedOffset).store(lease.value, std::memory_order_release);
}

// NOLINTNEXTLINE(readability-make-member-function-const): it writes the shared memory.
void AttacherWords::set_attached(LeaseId lease) noexcept {
  word(memory_.mapping, words::kAttachedOffset).store(lease.value, std::memory_order_relaxed);
}

// NOLINTNEXTLINE(readability-make-member-function-const): it writes the shared memory.
void AttacherWords::beat() noexcept {
  const std::atomic_ref<std::uint64_t> beats = word(memory_.mapping, words::kBeatOffset);
  beats.store(beats.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

Result<AttacherWordsView> AttacherWordsView::map(const UniqueFd& fd, IncarnationId incarnation) {
  KVFERRY_ASSIGN(SharedMapping mapping,
                 SharedMemory::map_single_writer(fd, words::kAttacherSegmentBytes));
  KVFERRY_TRY(check_published(mapping, words::kAttacherMagic, incarnation));
  return AttacherWordsView(std::move(mapping));
}

LeaseId AttacherWordsView::released() const noexcept {
  // Pairs with the release store in AttacherWords::release_up_to().
  return LeaseId{word(mapping_, words::kReleasedOffset).load(std::memory_order_acquire)};
}

LeaseId AttacherWordsView::prepared() const noexcept {
  // Pairs with the release store in AttacherWords::set_prepared().
  return LeaseId{word(mapping_, words::kPreparedOffset).load(std::memory_order_acquire)};
}

}  // namespace kvferry::ipc::lease
