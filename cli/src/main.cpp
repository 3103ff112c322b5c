// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "command.hpp"
#include "print.hpp"

#include <exception>

int main(int argc, char** argv) {
  kvferry::cli::prepare_streams();
  try {
    const int code =
        kvferry::cli::run_program(argv[0], kvferry::cli::Arguments(argv + 1, argv + argc));
    const bool complete = kvferry::cli::stdout_complete(argc > 1 ? argv[1] : "");
    return code == kvferry::cli::kExitDone && !complete ? kvferry::cli::kExitFailed : code;
  } catch (const std::exception& error) {
    kvferry::cli::write_err("kvferry: ");
    kvferry::cli::write_err(error.what());
    kvferry::cli::write_err("\n");
    return kvferry::cli::kExitFailed;
  }
}
