// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kvferry::test {

struct WrittenTensor {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
};

/// What its words are made from.
inline std::uint64_t mix_of(const std::string& name, std::uint64_t seed) {
  std::uint64_t mixed = seed * 0x9E3779B97F4A7C15ULL;
  for (const char letter : name) {
    mixed = (mixed ^ static_cast<unsigned char>(letter)) * 0x100000001B3ULL;
  }
  return mixed;
}
inline std::uint64_t word_of(std::uint64_t mix, std::uint64_t index) {
  std::uint64_t word = (mix ^ (index + 1)) * 0xD6E8FEB86659FD93ULL;
  word ^= word >> 32U;
  return word * 0xD6E8FEB86659FD93ULL;
}
/// What write_safetensors() puts at that place of a tensor.
inline std::byte byte_of(const std::string& name, std::uint64_t seed, std::uint64_t place) {
  const std::uint64_t word = word_of(mix_of(name, seed), place / sizeof(std::uint64_t));
  return static_cast<std::byte>(word >> (8 * (place % sizeof(std::uint64_t))));
}

/// A whole file, its tensors filled from the seed.
inline void write_safetensors(const std::filesystem::path& file,
                              const std::vector<WrittenTensor>& tensors,
                              std::uint64_t seed) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::vector<std::uint64_t> sizes;
  std::uint64_t offset = 0;
  for (const WrittenTensor& tensor : tensors) {
    std::uint64_t bytes = tensor.dtype == "BF16" ? 2 : tensor.dtype == "F32" ? 4 : 1;
    for (const std::uint64_t dimension : tensor.shape) bytes *= dimension;
    header +=
        fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", tensor.name,
                    tensor.dtype, fmt::join(tensor.shape, ","), offset, offset + bytes);
    sizes.push_back(bytes);
    offset += bytes;
  }
  header += "}";
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  const std::uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), sizeof(length));
  out << header;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    // Word by word: some tests write hundreds of MiB.
    const std::uint64_t mix = mix_of(tensors[i].name, seed);
    std::vector<std::uint64_t> words((sizes[i] + sizeof(std::uint64_t) - 1) /
                                     sizeof(std::uint64_t));
    for (std::size_t index = 0; index < words.size(); ++index) words[index] = word_of(mix, index);
    out.write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(sizes[i]));
  }
}

}  // namespace kvferry::test
