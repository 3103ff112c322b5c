// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/weights_files.hpp"

#include "rl/mix.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;

/// Enough rows for as many ranks as there may be, with any of these row lengths.
constexpr std::uint64_t kLeastTensorBytes = 16ULL << 10;
constexpr std::size_t kChunkBytes = 1U << 20;

/// A matrix of about so many bytes whose rows can be dealt out evenly, or just cannot.
TensorShape matrix(std::string name,
                   std::string_view dtype,
                   std::uint32_t element_bytes,
                   std::uint64_t columns,
                   std::uint64_t about_bytes,
                   std::uint32_t ranks,
                   bool even) {
  const std::uint64_t rows = about_bytes / (columns * element_bytes);
  const std::uint64_t dealt = std::max<std::uint64_t>(1, rows / ranks) * ranks;
  return {std::move(name), std::string(dtype), element_bytes, {even ? dealt : dealt + 1, columns}};
}

std::string header_of(const std::vector<TensorShape>& tensors) {
  std::string header = R"({"__metadata__":{"format":"pt"})";
  std::uint64_t offset = 0;
  for (const TensorShape& tensor : tensors) {
    const std::uint64_t end = offset + tensor.size_bytes();
    header +=
        fmt::format(R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", tensor.name,
                    tensor.dtype, fmt::join(tensor.dimensions, ","), offset, end);
    offset = end;
  }
  return header + "}";
}

void write_contents(std::ofstream& out, std::uint64_t size_bytes, Mix mix) {
  std::vector<char> chunk(kChunkBytes);
  while (size_bytes > 0 && out) {
    for (std::size_t at = 0; at < chunk.size(); at += sizeof(std::uint64_t)) {
      const std::uint64_t word = mix.next();
      std::memcpy(chunk.data() + at, &word, sizeof(word));
    }
    const std::uint64_t length = std::min<std::uint64_t>(size_bytes, chunk.size());
    out.write(chunk.data(), static_cast<std::streamsize>(length));
    size_bytes -= length;
  }
}

}  // namespace

std::uint64_t TensorShape::size_bytes() const {
  std::uint64_t size = element_bytes;
  for (const std::uint64_t dimension : dimensions) size *= dimension;
  return size;
}

std::vector<TensorShape> model_tensors(std::uint64_t total_bytes, std::uint32_t ranks) {
  const auto share = [total_bytes](std::uint64_t sixteenths) {
    return std::max(kLeastTensorBytes, total_bytes / 16 * sixteenths);
  };
  return {matrix("embed", "BF16", 2, 64, share(8), ranks, true),
          matrix("layers.0.attention", "F16", 2, 96, share(4), ranks, true),
          matrix("layers.0.norm", "F32", 4, 1, share(1), ranks, ranks == 1),
          matrix("layers.0.experts", "U8", 1, 48, share(2), ranks, ranks == 1),
          {"layers.0.scale", "F32", 4, {}},
          matrix("head", "F32", 4, 32, share(1), ranks, true)};
}

ipc::Status write_weights(const fs::path& file,
                          const std::vector<TensorShape>& tensors,
                          std::uint64_t seed,
                          std::uint32_t version) {
  errno = 0;
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  const std::string header = header_of(tensors);
  static_assert(std::endian::native == std::endian::little);
  const std::uint64_t length = header.size();
  std::array<char, sizeof(length)> prefix{};
  std::memcpy(prefix.data(), &length, sizeof(length));
  out.write(prefix.data(), prefix.size());
  out << header;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Mix seeds(seed ^ (i << 48U) ^ (static_cast<std::uint64_t>(version) << 32U));
    write_contents(out, tensors[i].size_bytes(), Mix(seeds.next()));
  }
  out.close();  // some file systems tell only now that there was no room
  if (!out) {
    if (errno == 0) errno = EIO;
    return KVFERRY_ERRNO("weights file {}; give less --weights-size", file.string());
  }
  return ipc::ok();
}

ipc::Digest weights_id(std::uint64_t seed, std::uint32_t version) {
  const std::string text = fmt::format("kvferry rl-loop, seed {}, version {}", seed, version);
  return ipc::Digest::hash(text.data(), text.size());
}

ipc::Result<std::vector<WeightsVersion>> write_weights_versions(const fs::path& folder,
                                                                std::uint64_t total_bytes,
                                                                std::uint32_t ranks,
                                                                std::uint64_t seed) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    errno = error.value();
    return KVFERRY_ERRNO("folder for weights {}", folder.string());
  }
  const std::vector<TensorShape> tensors = model_tensors(total_bytes, ranks);
  std::vector<WeightsVersion> versions;
  for (std::uint32_t version = 0; version < kWeightsVersions; ++version) {
    const fs::path file = folder / fmt::format("version-{}.safetensors", version);
    KVFERRY_TRY(write_weights(file, tensors, seed, version));
    versions.push_back({file, weights_id(seed, version)});
  }
  return versions;
}

}  // namespace kvferry::cli
