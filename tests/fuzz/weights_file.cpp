// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file, in front of as many bytes of tensors as the first four bytes of
// the input say. What is accepted covers those bytes without a gap, each tensor once.
#include "fuzz.hpp"
#include "safetensors.hpp"

#include <span>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvferry;
  fuzz::Input input(data, size);
  const std::uint64_t data_bytes = input.number(4);
  const std::string text(input.text());
  const std::uint64_t start = 8 + text.size();
  const auto tensors =
      worker::parse_safetensors(std::as_bytes(std::span(text)), text.size(), start + data_bytes);
  if (!tensors) {
    KVFERRY_CHECK(!tensors.error().message.empty(), "an error without words");
    return 0;
  }
  std::uint64_t end = start;
  for (const worker::TensorInfo& tensor : *tensors) {
    KVFERRY_CHECK(tensor.offset == end, "a gap or an overlap");
    end += tensor.size_bytes;
    (void)worker::describe(tensor);
  }
  KVFERRY_CHECK(end == start + data_bytes, "the tensors do not end with the file");
  return 0;
}
