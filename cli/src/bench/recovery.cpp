// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/recovery.hpp"

#include "kvferry/ipc/base/clock.hpp"

#include <optional>
#include <unordered_map>

namespace kvferry::cli {
namespace {

/// Before the kill, for traffic to be in full swing.
constexpr std::uint64_t kJobsBefore = 32;

class RecoveryTraffic {
 public:
  RecoveryTraffic(BenchTarget& target,
                  const std::vector<std::vector<worker::SequenceItem>>& jobs,
                  std::uint32_t in_flight)
      : target_(target), jobs_(jobs), in_flight_(in_flight) {}

  [[nodiscard]] ipc::Result<double> run();

 private:
  struct UnderWay {
    std::uint64_t handle = 0;
    bool after_death = false;
  };

  [[nodiscard]] bool has_died() const { return target_.deaths() > deaths_before_; }
  /// As many jobs as may be under way. What is refused between death and recovery is tried again
  /// when something has come.
  void fill();
  void take();

  BenchTarget& target_;
  const std::vector<std::vector<worker::SequenceItem>>& jobs_;
  const std::uint32_t in_flight_;
  std::unordered_map<std::uint64_t, UnderWay> under_way_;
  std::uint64_t turn_ = 0;
  std::uint64_t done_ = 0;
  std::uint64_t deaths_before_ = 0;
  bool killed_ = false;
  bool stopped_ = false;  ///< No new jobs.
  std::optional<ipc::TimePoint> recovered_;
  std::optional<ipc::Error> failed_;  ///< A job did, without a death.
};

void RecoveryTraffic::fill() {
  while (!stopped_ && !failed_ && under_way_.size() < in_flight_ && target_.accepts()) {
    const std::uint64_t turn = turn_++ % jobs_.size();
    const std::uint64_t handle = turn + 1;
    const bool after_death = has_died();
    const auto id = target_.submit(handle, jobs_[turn], /*to_host=*/true);
    if (!id) {
      if (!killed_) failed_ = id.error();
      return;
    }
    under_way_.emplace(*id, UnderWay{handle, after_death});
  }
}

void RecoveryTraffic::take() {
  target_.take([this](const BenchTarget::Ended& job) {
    const auto found = under_way_.find(job.job);
    if (found == under_way_.end()) return;
    const UnderWay ended = found->second;
    under_way_.erase(found);
    if (job.error) {
      if (!killed_ && !failed_) failed_ = job.error;
      return;
    }
    target_.note_progress();
    ++done_;
    if (ended.after_death && !recovered_) recovered_ = ipc::MonotonicClock::now();
  });
}

ipc::Result<double> RecoveryTraffic::run() {
  deaths_before_ = target_.deaths();
  const auto goes_on = [this](auto until) {
    return [this, until] {
      take();
      if (failed_ || until()) return true;
      fill();
      return false;
    };
  };
  KVFERRY_TRY(target_.run_until(goes_on([this] { return done_ >= kJobsBefore; }), "traffic"));
  if (failed_) return *failed_;
  fill();
  killed_ = true;
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  KVFERRY_TRY(target_.kill_copier());
  KVFERRY_TRY(target_.run_until(goes_on([this] { return recovered_.has_value(); }),
                                "recovery from the death of what copies"));
  stopped_ = true;
  KVFERRY_TRY(target_.run_until(goes_on([this] { return under_way_.empty(); }), "copies"));
  return std::chrono::duration<double, std::micro>(*recovered_ - start).count();
}

}  // namespace

ipc::Result<double> measure_recovery(BenchTarget& target,
                                     const std::vector<std::vector<worker::SequenceItem>>& jobs,
                                     std::uint32_t in_flight) {
  return RecoveryTraffic(target, jobs, in_flight).run();
}

}  // namespace kvferry::cli
