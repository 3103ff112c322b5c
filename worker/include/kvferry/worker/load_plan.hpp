// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/worker/load_choice.hpp"
#include "kvferry/worker/prefix_plan.hpp"

#include <cstdint>

namespace kvferry::worker {

/// A request's plan, and what was chosen for it; to be told to LoadChoice::on_done() once the plan
/// is carried out.
struct ChosenPlan {
  PrefixPlan plan;
  LoadChoice::Decision decision;
};

/// Takes out of a plan the loads that are not worth it. plan: with host memory; on_device: without;
/// both of plan_prefix() for a request of `length` blocks, of which `whole` are full. A prefix of
/// groups that hold all their blocks is cut where loading ends to be faster; a window or a state
/// serves one length of prefix only, so that with such a group the loads are all made or none.
/// tokens_per_block, ahead_bytes: see LoadChoice::choose().
[[nodiscard]] ChosenPlan choose_loads(const LoadChoice& choice,
                                      const ipc::Geometry& geometry,
                                      PrefixPlan plan,
                                      PrefixPlan on_device,
                                      std::uint32_t length,
                                      std::uint32_t whole,
                                      std::uint32_t tokens_per_block,
                                      std::uint64_t ahead_bytes,
                                      ipc::TimePoint now);

/// What a load of one block moves over the links of all ranks.
[[nodiscard]] std::uint64_t link_bytes(const ipc::Geometry& geometry, ipc::GroupId group);

}  // namespace kvferry::worker
