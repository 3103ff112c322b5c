// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  try {
    return kvferry::cli::run_program(argv[0], kvferry::cli::Arguments(argv + 1, argv + argc));
  } catch (const std::exception& error) {
    fmt::print(stderr, "kvferry: {}\n", error.what());
    return kvferry::cli::kExitFailed;
  }
}
