// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/transitions/transition_log.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "os/syscall.hpp"
#include "transitions/planned_faults.hpp"
#include "transitions/ring_files.hpp"
#include "transitions/ring_format.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <utility>

namespace kvferry::ipc {
namespace {

using transitions::RecordCounts;
using transitions::RecordWords;
using transitions::RingHeader;
using transitions::RingRecord;

std::uint64_t monotonic_ns() noexcept {
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

template <std::size_t N> void copy_text(std::string_view text, std::array<char, N>& out) noexcept {
  const std::size_t count = std::min(text.size(), N - 1);
  std::copy_n(text.begin(), count, out.begin());
  out[count] = '\0';
}

// Tests plan faults for processes that they start with the program's own command line. The first
// log takes them: a client that connects anew has another one, in which nothing strikes again.
FaultPlan take_plan_of_this_process() {
  static std::atomic<bool> taken{false};
  if (!FaultPlan::is_supported() || taken.exchange(true)) return {};
  auto plan = FaultPlan::parse(environment("KVFERRY_FAULTS"));
  if (plan) return std::move(plan).value();
  log_warn("KVFERRY_FAULTS is ignored: {}", plan.error().to_string());
  return {};
}

}  // namespace

/// The mapped file. The lock on its descriptor tells that the process lives.
class TransitionLog::Ring {
 public:
  static Result<std::shared_ptr<Ring>> create(const std::filesystem::path& path,
                                              const TransitionWriter& writer,
                                              std::size_t records,
                                              const FaultPlan& faults) {
    UniqueFd fd(retry_interrupted([&] {
      return ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    }));
    if (!fd.valid()) return KVFERRY_ERRNO("create {}", path.native());
    auto ring = fill(path, std::move(fd), writer, records, faults);
    if (!ring) (void)::unlink(path.c_str());
    return ring;
  }

  Ring(UniqueFd fd, void* memory, const RecordCounts& counts, const FaultPlan& faults)
      : fd_(std::move(fd)),
        memory_(static_cast<std::byte*>(memory)),
        counts_(counts),
        faults_(faults) {}
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() { (void)::munmap(memory_, transitions::file_bytes(counts_)); }

  void record(Transition transition, const TransitionFields& fields) noexcept {
    const bool of_jobs = is_of_jobs(transition);
    const std::size_t ring = of_jobs ? transitions::kJobRing : transitions::kHandshakeRing;
    const std::uint64_t number = header().next[ring].fetch_add(1, std::memory_order_relaxed) + 1;
    RingRecord& place = records_of(ring)[(number - 1) & (counts_[ring] - 1)];
    const RecordWords words{monotonic_ns(),
                            static_cast<std::uint64_t>(transition) |
                                (static_cast<std::uint64_t>(thread_number()) << 32U),
                            fields.session.low(),
                            fields.epoch.value,
                            of_jobs ? fields.job.value : fields.lease.value,
                            fields.peer.low(),
                            fields.detail};
    // Each member is written after the record was marked as unfinished.
    constexpr auto kAfter = std::memory_order_release;
    place.number_and_check.store(0, std::memory_order_relaxed);
    place.time_ns.store(words[0], kAfter);
    place.transition_and_thread.store(words[1], kAfter);
    place.session.store(words[2], kAfter);
    place.epoch.store(words[3], kAfter);
    place.lease_or_job.store(words[4], kAfter);
    place.peer.store(words[5], kAfter);
    place.detail.store(words[6], kAfter);
    place.number_and_check.store(transitions::seal(number, words), std::memory_order_release);
  }

  /// True when what comes next is to fail.
  bool strike(Transition transition) noexcept {
    return faults_.strike(transition, [this](std::uint64_t detail) {
      record(Transition::kStruck, {.detail = detail});
    });
  }

 private:
  static Result<std::shared_ptr<Ring>> fill(const std::filesystem::path& path,
                                            UniqueFd fd,
                                            const TransitionWriter& writer,
                                            std::size_t records,
                                            const FaultPlan& faults) {
    // Before anybody can take it for that of an ended process.
    KVFERRY_TRY(transitions::lock_ring(fd.get()));
    const RecordCounts counts{records, records * kJobRecordsEach};
    const std::size_t bytes = transitions::file_bytes(counts);
    // Really there: a full file system must not fault a later write.
    if (retry_interrupted([&] { return ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)); }) !=
        0) {
      return KVFERRY_ERRNO("allocate {} bytes for {}", bytes, path.native());
    }
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (memory == MAP_FAILED) return KVFERRY_ERRNO("map {}", path.native());
    auto ring = std::make_shared<Ring>(std::move(fd), memory, counts, faults);
    RingHeader& header = ring->header();
    header.version = transitions::kRingVersion;
    header.pid = static_cast<std::uint32_t>(::getpid());
    header.record_counts = counts;
    header.incarnation = {writer.incarnation.high(), writer.incarnation.low()};
    header.rank = writer.rank.value;
    copy_text(writer.role, header.role);
    copy_text(writer.engine, header.engine);
    header.magic.store(transitions::kRingMagic, std::memory_order_release);
    return ring;
  }

  // The file begins with zeros, which every member may hold.
  [[nodiscard]] RingHeader& header() noexcept { return *reinterpret_cast<RingHeader*>(memory_); }
  [[nodiscard]] RingRecord* records_of(std::size_t ring) noexcept {
    return reinterpret_cast<RingRecord*>(memory_ + transitions::ring_offset(counts_, ring));
  }

  static std::uint32_t thread_number() noexcept {
    thread_local const auto kNumber = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    return kNumber;
  }

  UniqueFd fd_;
  std::byte* memory_;
  RecordCounts counts_;
  transitions::PlannedFaults faults_;
};

Result<TransitionLog> TransitionLog::create(const RuntimeDir& dir,
                                            TransitionWriter writer,
                                            std::size_t records,
                                            FaultPlan faults) {
  if (transitions::is_bad_count(records) || transitions::is_bad_count(records * kJobRecordsEach)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a ring of {} transitions: give a power of two from {} to {}", records,
                         transitions::kMinRecords, transitions::kMaxRecords / kJobRecordsEach);
  }
  KVFERRY_ASSIGN(const std::filesystem::path folder, transitions::make_ring_folder(dir));
  transitions::remove_ended_rings(folder, kEndedKept);
  writer.pid = ::getpid();
  KVFERRY_ASSIGN(auto ring,
                 Ring::create(folder / transitions::ring_name(writer), writer, records, faults));
  TransitionLog log;
  log.ring_ = std::move(ring);
  return log;
}

TransitionLog TransitionLog::create_or_warn(const RuntimeDir& dir, TransitionWriter writer) {
  auto created = create(dir, std::move(writer), kDefaultRecords, take_plan_of_this_process());
  if (created) return std::move(created).value();
  log_warn("transitions are not recorded: {}", created.error().to_string());
  return {};
}

void TransitionLog::record(Transition transition, const TransitionFields& fields) const noexcept {
  if (!ring_) return;
  ring_->record(transition, fields);
#if defined(KVFERRY_FAULT_POINTS)
  (void)ring_->strike(transition);
#endif
}

Status TransitionLog::attempt(Transition transition, const TransitionFields& fields) const {
  if (!ring_) return ok();
  ring_->record(transition, fields);
#if defined(KVFERRY_FAULT_POINTS)
  if (ring_->strike(transition)) {
    return KVFERRY_ERROR(kSystem, "a failure was planned at {}", to_string(transition));
  }
#endif
  return ok();
}

}  // namespace kvferry::ipc
