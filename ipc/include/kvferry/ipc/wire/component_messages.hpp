// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

/// Messages about the components of workers; see docs/lifecycle.md. Part of what kWireVersion
/// counts.
namespace kvferry::ipc {

/// Which components of each rank are to end their use; none: all are only looked at.
struct ComponentNames {
  static constexpr std::size_t kMost = 64;
  bool all = false;
  std::vector<std::string> names;  ///< Without all.
  template <typename V> void visit(V& v) { v(all, names); }
  [[nodiscard]] bool only_looks() const noexcept { return !all && names.empty(); }
  /// kInvalidArgument for more than kMost names, what is no name, or names beside all.
  [[nodiscard]] Status check() const;
};

// ---- operator and engine -> manager ----

struct ComponentsRequest {
  std::string engine;  ///< Empty: the only one.
  ComponentNames release;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(engine, release, deadline); }
};
/// Of one component: what it is now, and what its release came to.
struct ComponentOutcome {
  ComponentRelease outcome;
  bool released = false;       ///< It was asked for, and went through.
  std::optional<Error> error;  ///< Why it did not.
  template <typename V> void visit(V& v) { v(outcome, released, error); }
};
struct RankComponentsReply {
  std::vector<ComponentOutcome> components;  ///< All that the rank has.
  template <typename V> void visit(V& v) { v(components); }
  /// kProtocol for more than kMost, or what is no name: a worker says so to its manager.
  static constexpr std::size_t kMost = 1024;
  [[nodiscard]] Status check() const;
};
struct RankComponentsOutcome {
  Rank rank;
  RankComponentsReply reply;
  std::optional<Error> error;  ///< The rank's: of no worker, or of a name that it does not know.
  template <typename V> void visit(V& v) { v(rank, reply, error); }
};
struct ComponentsReply {  ///< The envelope's error names the first failing rank.
  std::vector<RankComponentsOutcome> ranks;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(ranks, took); }
};

// ---- manager -> worker, answered with a RankComponentsReply ----

struct RankComponents {
  ComponentNames release;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(release, deadline); }
};

}  // namespace kvferry::ipc
