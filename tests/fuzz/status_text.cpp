// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The manager's status, as another version or another process may have written it.
#include "status_text.hpp"

#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  const std::string_view json = fuzz::Input(data, size).text();
  const auto text = cli::describe_status(json);
  if (text) KVFERRY_CHECK(text->starts_with("manager of instance"), "no status in the text");
  (void)cli::describe_missing(json, "chat");
  return 0;
}
