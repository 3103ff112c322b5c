// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"

namespace kvferry::ipc {

bool is_mutant(std::string_view name) noexcept {
  static const std::string kChosen = environment("KVFERRY_MUTANT");
  return name == kChosen;
}

}  // namespace kvferry::ipc
