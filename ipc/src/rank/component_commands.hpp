// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/wire/component_messages.hpp"

#include <vector>

namespace kvferry::ipc {

/// Looks at a worker's components and releases of them, as the manager commands them.
/// @threading look: any; a release: one at a time, on the thread that ComponentUser names.
class ComponentCommands {
 public:
  /// user: null for a process that has none.
  explicit ComponentCommands(ComponentUser* user) : user_(user) {}

  [[nodiscard]] static bool is_command(const Envelope& envelope) noexcept {
    return !envelope.is_reply && envelope.kind == MessageKind::kRankComponents;
  }
  /// Whether it releases nothing, so that nothing has to be waited for.
  [[nodiscard]] static bool only_looks(const Envelope& request);
  /// Carries a command out, to its end. received: when it came; by its deadline from then on nobody
  /// waits for it any more, and it does nothing.
  [[nodiscard]] Envelope run(const Envelope& request, TimePoint received);

 private:
  [[nodiscard]] Result<RankComponentsReply> answer(const Envelope& request, TimePoint received);
  [[nodiscard]] Status check_known(const std::vector<ComponentState>& known,
                                   const ComponentNames& asked) const;
  [[nodiscard]] ComponentOutcome release(ComponentState before, Deadline deadline);
  [[nodiscard]] ComponentState look_again(ComponentState before) const;

  ComponentUser* const user_;
};

}  // namespace kvferry::ipc
