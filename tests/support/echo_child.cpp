// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Helper of child_process_test: obeys one command per line.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "support/child_side.hpp"

int main(int argc, char** argv) {
  using kvferry::test::hear;
  using kvferry::test::say;
  for (int i = 1; i < argc; ++i) say(std::string("arg ") + argv[i]);
  while (const auto line = hear()) {
    if (line->starts_with("echo ")) say(line->substr(5));
    if (line->starts_with("exit ")) return std::atoi(line->c_str() + 5);
    if (line->starts_with("env ")) {
      // NOLINTNEXTLINE(concurrency-mt-unsafe): this process has one thread.
      const char* value = std::getenv(line->c_str() + 4);
      say(value == nullptr ? "unset" : value);
    }
    if (line->starts_with("fd ")) {
      say(::fcntl(std::atoi(line->c_str() + 3), F_GETFD) < 0 ? "closed" : "open");
    }
    if (*line == "flood") {
      for (int i = 0; i < 20000; ++i) say("a line of a flood that no pipe holds");
      return 3;
    }
    if (*line == "complain") {
      const std::string text(300000, 'e');
      if (::write(STDERR_FILENO, text.data(), text.size()) < 0) return 4;
      say("complained");
    }
  }
  return 0;
}
