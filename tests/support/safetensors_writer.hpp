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

/// What write_safetensors() puts at that place of a tensor.
inline std::byte byte_of(const std::string& name, std::uint64_t seed, std::uint64_t place) {
  std::uint64_t mixed = seed * 0x9E3779B97F4A7C15ULL + place * 0xD6E8FEB86659FD93ULL;
  for (const char letter : name)
    mixed = (mixed ^ static_cast<unsigned char>(letter)) * 0x100000001B3ULL;
  return static_cast<std::byte>(mixed >> 56U);
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
    std::string bytes(sizes[i], '\0');
    for (std::uint64_t place = 0; place < sizes[i]; ++place) {
      bytes[place] = static_cast<char>(byte_of(tensors[i].name, seed, place));
    }
    out << bytes;
  }
}

}  // namespace kvferry::test
