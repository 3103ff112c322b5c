// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_trace.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "os/syscall.hpp"
#include "transitions/ring_files.hpp"
#include "transitions/ring_format.hpp"
#include "transitions/transition_names.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <tuple>
#include <utility>

namespace kvferry::ipc {
namespace {

using transitions::RecordCounts;
using transitions::RecordWords;
using transitions::RingHeader;
using transitions::RingRecord;

// The clock counts from the machine's start: later times (146 years) were never recorded, and
// sums with them could overflow.
constexpr std::uint64_t kMaxTimeNs = std::uint64_t{1} << 62U;

// Plain copies of what is read from a file that somebody may write at the same time.
struct HeaderCopy {
  std::array<std::uint64_t, transitions::kHeaderBytes / sizeof(std::uint64_t)> words{};
};
struct RecordCopy {
  std::uint64_t number_and_check = 0;
  RecordWords words{};
};
static_assert(sizeof(RecordCopy) == sizeof(RingRecord));

template <typename T> T read_member(const HeaderCopy& copy, std::size_t offset) {
  T value;
  std::memcpy(&value, reinterpret_cast<const std::byte*>(copy.words.data()) + offset, sizeof(T));
  return value;
}

template <std::size_t N> std::string to_text(const std::array<char, N>& chars) {
  const auto* end = std::find(chars.begin(), chars.end(), '\0');
  std::string text(chars.begin(), end);
  // It goes to terminals.
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

Status read_at(int fd, void* out, std::size_t bytes, std::size_t offset) {
  auto* place = static_cast<std::byte*>(out);
  while (bytes > 0) {
    const ssize_t count =
        retry_interrupted([&] { return ::pread(fd, place, bytes, static_cast<off_t>(offset)); });
    if (count < 0) return KVFERRY_ERRNO("read");
    if (count == 0) return KVFERRY_ERROR(kProtocol, "it ends after {} bytes", offset);
    place += count;
    bytes -= static_cast<std::size_t>(count);
    offset += static_cast<std::size_t>(count);
  }
  return ok();
}

TransitionRecord to_record(std::uint64_t number, const RecordWords& words, std::size_t writer) {
  TransitionRecord record;
  record.time = std::chrono::nanoseconds(words[0]);
  record.writer = writer;
  record.number = number;
  const auto transition = static_cast<std::uint32_t>(words[1]);
  if (transition < static_cast<std::uint32_t>(Transition::kEnd)) {
    record.transition = static_cast<Transition>(transition);
  }
  record.thread = static_cast<std::uint32_t>(words[1] >> 32U);
  record.session = words[2];
  record.epoch = Epoch{words[3]};
  if (is_of_jobs(record.transition)) {
    record.job = JobId{words[4]};
  } else {
    record.lease = LeaseId{words[4]};
  }
  record.peer = words[5];
  record.detail = words[6];
  return record;
}

/// Appends a ring's whole records, of the writer that comes next; returns how many are lost.
Result<std::uint64_t> read_records(int fd,
                                   const RecordCounts& counts,
                                   std::size_t ring,
                                   TransitionTrace& trace) {
  const std::size_t count = counts[ring];
  std::vector<RecordCopy> copies(count);
  KVFERRY_TRY(read_at(fd, copies.data(), count * sizeof(RecordCopy),
                      transitions::ring_offset(counts, ring)));
  std::uint64_t newest = 0;
  std::uint64_t whole = 0;
  for (std::size_t place = 0; place < copies.size(); ++place) {
    const RecordCopy& copy = copies[place];
    // The half number that is stored, completed by its place, must give the same seal again.
    const std::uint64_t number = copy.number_and_check & 0xffff'ffffU;
    if (number == 0 || ((number - 1) & (count - 1)) != place ||
        transitions::seal(number, copy.words) != copy.number_and_check ||
        copy.words[0] > kMaxTimeNs) {
      continue;
    }
    trace.records.push_back(to_record(number, copy.words, trace.writers.size()));
    newest = std::max(newest, number);
    ++whole;
  }
  return newest - whole;
}

/// Appends the writer and its records.
Status read_ring(const std::filesystem::path& path, TransitionTrace& trace) {
  const UniqueFd fd(retry_interrupted(
      [&] { return ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); }));
  if (!fd.valid()) return KVFERRY_ERRNO("open");
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("stat");
  if (!S_ISREG(info.st_mode)) return KVFERRY_ERROR(kProtocol, "it is no regular file");
  HeaderCopy header;
  KVFERRY_TRY(read_at(fd.get(), &header, sizeof(header), 0));
  const auto magic = read_member<std::uint64_t>(header, offsetof(RingHeader, magic));
  const auto version = read_member<std::uint32_t>(header, offsetof(RingHeader, version));
  const auto counts = read_member<RecordCounts>(header, offsetof(RingHeader, record_counts));
  if (magic != transitions::kRingMagic) {
    return KVFERRY_ERROR(kProtocol, "it is not a ring of transitions");
  }
  if (version != transitions::kRingVersion) {
    return KVFERRY_ERROR(kVersionMismatch, "it has version {}, this program reads {}", version,
                         transitions::kRingVersion);
  }
  if (std::any_of(counts.begin(), counts.end(), transitions::is_bad_count) ||
      static_cast<std::uint64_t>(info.st_size) != transitions::file_bytes(counts)) {
    return KVFERRY_ERROR(kProtocol, "it says {} and {} transitions and has {} bytes",
                         counts[transitions::kHandshakeRing], counts[transitions::kJobRing],
                         info.st_size);
  }

  TransitionTrace::Writer writer;
  writer.who.role =
      to_text(read_member<decltype(RingHeader::role)>(header, offsetof(RingHeader, role)));
  writer.who.engine =
      to_text(read_member<decltype(RingHeader::engine)>(header, offsetof(RingHeader, engine)));
  writer.who.rank = Rank{read_member<std::uint32_t>(header, offsetof(RingHeader, rank))};
  writer.who.pid =
      static_cast<pid_t>(read_member<std::uint32_t>(header, offsetof(RingHeader, pid)));
  const auto incarnation =
      read_member<std::array<std::uint64_t, 2>>(header, offsetof(RingHeader, incarnation));
  writer.who.incarnation = Digest::from_words(incarnation[0], incarnation[1]);
  writer.who.ended = !transitions::is_written(fd.get());

  KVFERRY_ASSIGN(writer.lost, read_records(fd.get(), counts, transitions::kHandshakeRing, trace));
  KVFERRY_ASSIGN(writer.lost_jobs, read_records(fd.get(), counts, transitions::kJobRing, trace));
  trace.writers.push_back(std::move(writer));
  return ok();
}

std::string short_id(std::uint64_t id) { return fmt::format("{:08x}", id >> 32U); }

// The process with this incarnation, if its ring is there.
std::string name_of(const TransitionTrace& trace, std::uint64_t incarnation) {
  for (const TransitionTrace::Writer& writer : trace.writers) {
    if (writer.who.incarnation.low() == incarnation) {
      return fmt::format("{} pid {}", writer.who.role, writer.who.pid);
    }
  }
  return "process " + short_id(incarnation);
}

}  // namespace

Result<TransitionTrace> read_transitions(const RuntimeDir& dir) {
  TransitionTrace trace;
  std::error_code error;
  std::filesystem::directory_iterator entries(dir.transitions_folder(), error);
  if (error == std::errc::no_such_file_or_directory) {
    return KVFERRY_ERROR(kNotFound,
                         "{} is not there: no process of instance {} records transitions",
                         dir.transitions_folder().native(), dir.instance());
  }
  if (error) {
    return KVFERRY_ERROR(kSystem, "{}: {}", dir.transitions_folder().native(), error.message());
  }
  for (const auto& entry : entries) {
    const std::size_t whole = trace.records.size();
    if (const Status read = read_ring(entry.path(), trace); !read) {
      trace.records.resize(whole);
      log_warn("{} left out: {}", entry.path().native(), read.error().to_string());
    }
  }
  std::sort(trace.records.begin(), trace.records.end(),
            [](const TransitionRecord& a, const TransitionRecord& b) {
              return std::tie(a.time, a.writer, a.number) < std::tie(b.time, b.writer, b.number);
            });
  return trace;
}

std::string describe(const TransitionTrace& trace, const TransitionRecord& record) {
  std::string text(transitions::words_of(record.transition));
  const auto put = [&text](std::string_view placeholder, const std::string& value) {
    if (const auto at = text.find(placeholder); at != std::string::npos) {
      text.replace(at, placeholder.size(), value);
    }
  };
  put("{epoch}", fmt::format("{}", record.epoch.value));
  put("{lease}", fmt::format("{}", record.lease.value));
  put("{job}", fmt::format("{}", record.job.value));
  put("{peer}", name_of(trace, record.peer));
  put("{error}", record.detail > 0 && record.detail <= UINT8_MAX
                     ? std::string(to_string(static_cast<ErrorCode>(record.detail)))
                     : "unknown");
  put("{detail}", fmt::format("{}", record.detail));
  const TransitionWriter& who = trace.writers[record.writer].who;
  return fmt::format("{} {}/{} pid {} {}", who.role, who.engine, who.rank.value, who.pid, text);
}

}  // namespace kvferry::ipc
