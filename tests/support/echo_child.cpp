// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Helper of child_process_test: obeys one command per line.
#include "support/child_side.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string>

namespace {

int number(const std::string& text) {
  int value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  using kvferry::test::hear;
  using kvferry::test::say;
  for (int i = 1; i < argc; ++i) say(std::string("arg ") + argv[i]);
  while (const auto line = hear()) {
    if (line->starts_with("echo ")) say(line->substr(5));
    if (line->starts_with("exit ")) return number(line->substr(5));
    if (line->starts_with("env ")) {
      // NOLINTNEXTLINE(concurrency-mt-unsafe): this process has one thread.
      const char* value = std::getenv(line->c_str() + 4);
      say(value == nullptr ? "unset" : value);
    }
    if (line->starts_with("fd ")) {
      say(::fcntl(number(line->substr(3)), F_GETFD) < 0 ? "closed" : "open");
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
