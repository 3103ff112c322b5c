// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The shared words of a peer: a segment of any size, sealed or not, with anything in it.
#include "lease/lease_words.hpp"

#include "fuzz.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace kvferry::fuzz {
namespace {

using namespace ipc::lease;

ipc::UniqueFd make_segment(std::span<const std::uint8_t> contents, int seals) {
  ipc::UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const auto written = ::pwrite(fd.get(), contents.data(), contents.size(), 0);
  KVFERRY_CHECK(written == static_cast<ssize_t>(contents.size()), "no segment");
  if (seals != 0) KVFERRY_CHECK(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0, "no seals");
  return fd;
}

void use(const OwnerWordsView& view) {
  const auto state = view.load();
  if (state) KVFERRY_CHECK(!ipc::to_string(state->phase).empty(), "a phase without a name");
}

void use(const AttacherWordsView& view) {
  (void)view.released();
  (void)view.prepared();
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE;
  const std::uint8_t choice = input.byte();
  const int seals = (choice & 1U) == 0 ? kAllSeals : kAllSeals & input.byte();
  const auto contents = input.rest();
  const ipc::UniqueFd fd = fuzz::make_segment(contents, seals);
  ipc::Digest nonce = ipc::Digest::from_words(1, 2);
  if ((choice & 2U) != 0) {  // The one that the segment says.
    fuzz::Input words(contents.data(), contents.size());
    (void)words.take(ipc::words::kNonceHighOffset);
    std::array<std::uint8_t, 16> nonce_bytes{};
    std::ranges::copy(words.take(nonce_bytes.size()), nonce_bytes.begin());
    std::reverse(nonce_bytes.begin(), nonce_bytes.begin() + 8);  // Little-endian words.
    std::reverse(nonce_bytes.begin() + 8, nonce_bytes.end());
    nonce.bytes = nonce_bytes;
  }
  if (const auto owner = ipc::lease::OwnerWordsView::map(fd, nonce)) fuzz::use(*owner);
  if (const auto attacher = ipc::lease::AttacherWordsView::map(fd, nonce)) fuzz::use(*attacher);
  return 0;
}
