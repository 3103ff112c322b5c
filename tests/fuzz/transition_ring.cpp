// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The rings of an instance: one file of arbitrary bytes, or well-sealed records of several
// processes that tell an arbitrary story. Read, held to the rules of the handshake, and shown.
#include "fuzz.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "scratch.hpp"
#include "transitions/ring_format.hpp"

#include <array>
#include <vector>

namespace kvferry::fuzz {
namespace {

using ipc::transitions::kMinRecords;
using ipc::transitions::RingHeader;
using ipc::transitions::RingRecord;

/// The file of one process.
class RingFile {
 public:
  explicit RingFile(std::uint8_t process) : bytes_(ipc::transitions::file_bytes(kCounts)) {
    RingHeader& header = *reinterpret_cast<RingHeader*>(bytes_.data());
    header.magic = ipc::transitions::kRingMagic;
    header.version = ipc::transitions::kRingVersion;
    header.record_counts = kCounts;
    header.incarnation = {0, process};
    header.role[0] = static_cast<char>('a' + process);
  }
  void add(std::size_t ring, const ipc::transitions::RecordWords& words) {
    const std::uint64_t number = ++numbers_.at(ring);
    auto* records =
        reinterpret_cast<RingRecord*>(bytes_.data() + ipc::transitions::ring_offset(kCounts, ring));
    RingRecord& record = records[(number - 1) % kMinRecords];
    record.time_ns = words[0];
    record.transition_and_thread = words[1];
    record.session = words[2];
    record.epoch = words[3];
    record.lease_or_job = words[4];
    record.peer = words[5];
    record.detail = words[6];
    record.number_and_check = ipc::transitions::seal(number, words);
  }
  [[nodiscard]] std::string_view bytes() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  static constexpr ipc::transitions::RecordCounts kCounts{kMinRecords, kMinRecords};

  std::vector<std::byte> bytes_;
  std::array<std::uint64_t, ipc::transitions::kRings> numbers_{};
};

// One record: the process, the transition, then small numbers or whole words.
void tell_story(Input& input, const std::filesystem::path& folder) {
  constexpr std::uint8_t kProcesses = 3;
  constexpr std::uint8_t kWide = 0x80;
  constexpr std::uint8_t kJob = 0x40;
  std::array<RingFile, kProcesses> rings{RingFile(0), RingFile(1), RingFile(2)};
  for (std::uint64_t time = 1; !input.empty(); ++time) {
    const std::uint8_t process = input.byte();
    const std::size_t width = (process & kWide) != 0 ? sizeof(std::uint64_t) : 1;
    ipc::transitions::RecordWords words{time, input.byte()};
    for (std::size_t word = 2; word < words.size(); ++word) words[word] = input.number(width);
    if (width > 1) words[0] = input.number(width);
    const std::size_t ring =
        (process & kJob) != 0 ? ipc::transitions::kJobRing : ipc::transitions::kHandshakeRing;
    rings[process % kProcesses].add(ring, words);
  }
  for (std::size_t i = 0; i < rings.size(); ++i) {
    write_file(folder / std::to_string(i), rings[i].bytes());
  }
}

void look_at(const ipc::TransitionTrace& trace) {
  for (const ipc::TransitionBreach& breach : ipc::check_transitions(trace)) {
    KVFERRY_CHECK(breach.record < trace.records.size(), "a breach of no record");
  }
  for (const ipc::TransitionRecord& record : trace.records) {
    KVFERRY_CHECK(!ipc::describe(trace, record).empty(), "a record without words");
    KVFERRY_CHECK(record.time.count() >= 0, "a time before the machine started");
  }
}

}  // namespace
}  // namespace kvferry::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  static const fuzz::ScratchDir scratch;
  const auto dir = ipc::RuntimeDir::open(scratch.path().native(), "fuzz");
  KVFERRY_CHECK(dir.has_value(), "no runtime directory");
  const std::filesystem::path folder = dir->transitions_folder();
  std::filesystem::create_directory(folder);
  fuzz::Input input(data, size);
  if (input.byte() % 2 == 0) {
    fuzz::write_file(folder / "ring", input.text());
  } else {
    fuzz::tell_story(input, folder);
  }
  const auto trace = ipc::read_transitions(*dir);
  KVFERRY_CHECK(trace.has_value(), "a bad ring ended the reading");
  fuzz::look_at(*trace);
  return 0;  // The directory goes with its last holder, and the rings with it.
}
