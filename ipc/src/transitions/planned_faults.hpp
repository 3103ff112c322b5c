// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/fault_plan.hpp"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>

namespace kvferry::ipc::transitions {

/// The faults of one process, each of which strikes once.
/// @threading strike() from any thread.
class PlannedFaults {
 public:
  /// Called just before a fault does what it does. detail: its kind in the low eight bits, above
  /// them the pid of the child that is left behind.
  using Told = std::function<void(std::uint64_t detail)>;

  explicit PlannedFaults(const FaultPlan& plan = {});

  /// Strikes if this transition's time has come; true when what comes next is to fail.
  bool strike(Transition transition, const Told& told) noexcept;

 private:
  struct Planned {
    explicit Planned(const Fault& planned) : fault(planned) {}
    Fault fault;
    std::atomic<std::uint32_t> seen{0};
  };
  std::deque<Planned> faults_;
};

}  // namespace kvferry::ipc::transitions
