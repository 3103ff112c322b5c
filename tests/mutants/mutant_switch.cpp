// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/process.hpp"
#include "lease/mutants.hpp"

namespace kvferry::ipc::lease {

bool is_mutant(std::string_view name) noexcept {
  static const std::string kChosen = environment("KVFERRY_MUTANT");
  return name == kChosen;
}

}  // namespace kvferry::ipc::lease
