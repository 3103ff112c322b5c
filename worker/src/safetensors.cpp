// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "safetensors.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

namespace kvferry::worker {

using ipc::Result;
using ipc::Status;

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLengthBytes = SafetensorsFile::kHeaderStart;
/// Far above what any model needs; a file that says more is broken.
constexpr std::uint64_t kMaxHeaderBytes = 100ULL << 20;
constexpr std::size_t kMaxTensors = 1U << 20;
constexpr std::size_t kMaxDimensions = 8;
constexpr int kMaxDepth = 4;
/// Of a name in a message.
constexpr std::size_t kShownChars = 200;

/// Bits of one element.
std::optional<std::uint64_t> bits_of(std::string_view dtype) {
  struct Known {
    std::string_view name;
    std::uint64_t bits;
  };
  constexpr std::array kKnown = {Known{"BOOL", 8},    Known{"U8", 8},      Known{"I8", 8},
                                 Known{"F8_E4M3", 8}, Known{"F8_E5M2", 8}, Known{"U16", 16},
                                 Known{"I16", 16},    Known{"F16", 16},    Known{"BF16", 16},
                                 Known{"U32", 32},    Known{"I32", 32},    Known{"F32", 32},
                                 Known{"U64", 64},    Known{"I64", 64},    Known{"F64", 64}};
  const auto* const found = std::find_if(
      kKnown.begin(), kKnown.end(), [dtype](const Known& known) { return known.name == dtype; });
  return found == kKnown.end() ? std::nullopt : std::optional(found->bits);
}

/// Nothing when it does not fit 64 bits.
std::optional<std::uint64_t> bytes_of(const TensorInfo& tensor, std::uint64_t bits) {
  std::uint64_t elements = 1;
  for (const std::uint64_t dimension : tensor.shape) {
    if (dimension != 0 && elements > (1ULL << 56U) / dimension) return std::nullopt;
    elements *= dimension;
  }
  return elements * (bits / 8);
}

template <typename... Args>
ipc::Error bad(std::string_view name, fmt::format_string<Args...> format, Args&&... args) {
  return KVFERRY_ERROR(kInvalidArgument, "tensor '{}': {}", shown(name),
                       fmt::format(format, std::forward<Args>(args)...));
}

Result<std::vector<std::uint64_t>> numbers_of(const std::string& name,
                                              const Json& entry,
                                              const char* key,
                                              std::size_t most) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array() || found->size() > most) {
    return bad(name, "its {} is no array of at most {} numbers", key, most);
  }
  std::vector<std::uint64_t> numbers;
  for (const Json& number : *found) {
    if (!number.is_number_unsigned()) {
      return bad(name, "its {} holds a {} that is no whole number from 0 on", key,
                 number.type_name());
    }
    numbers.push_back(number.get<std::uint64_t>());
  }
  return numbers;
}

Result<TensorInfo> parse_tensor(const std::string& name,
                                const Json& entry,
                                std::uint64_t data_start,
                                std::uint64_t data_bytes) {
  if (!entry.is_object()) return bad(name, "it is no object");
  TensorInfo tensor;
  tensor.name = name;
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) return bad(name, "it has no dtype");
  tensor.dtype = dtype->get<std::string>();
  const auto bits = bits_of(tensor.dtype);
  if (!bits) {
    return bad(name, "its dtype {} is not known",
               std::string_view(tensor.dtype).substr(0, kShownChars));
  }
  KVFERRY_ASSIGN(tensor.shape, numbers_of(name, entry, "shape", kMaxDimensions));
  KVFERRY_ASSIGN(const auto offsets, numbers_of(name, entry, "data_offsets", 2));
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data_bytes) {
    return bad(name, "its data_offsets [{}] are no range within the {} bytes of data",
               fmt::join(offsets, ", "), data_bytes);
  }
  tensor.offset = data_start + offsets[0];
  tensor.size_bytes = offsets[1] - offsets[0];
  if (bytes_of(tensor, *bits) != tensor.size_bytes) {
    return bad(name, "{} does not take the {} bytes of its data_offsets", describe(tensor),
               tensor.size_bytes);
  }
  return tensor;
}

}  // namespace

std::string describe(const TensorInfo& tensor) {
  return fmt::format("{} [{}]", tensor.dtype, fmt::join(tensor.shape, ", "));
}

std::string_view shown(std::string_view name) { return name.substr(0, kShownChars); }

Result<std::uint64_t> size_of(const TensorInfo& tensor) {
  const auto bits = bits_of(tensor.dtype);
  if (!bits) return bad(tensor.name, "its dtype {} is not known", shown(tensor.dtype));
  if (tensor.shape.size() > kMaxDimensions) {
    return bad(tensor.name, "it has {} dimensions; at most {} are known", tensor.shape.size(),
               kMaxDimensions);
  }
  const auto bytes = bytes_of(tensor, *bits);
  if (!bytes) return bad(tensor.name, "{} does not fit any memory", describe(tensor));
  return *bytes;
}

Status check_tensor(const TensorInfo& tensor) {
  KVFERRY_ASSIGN(const std::uint64_t bytes, size_of(tensor));
  if (bytes == tensor.size_bytes) return ipc::ok();
  return bad(tensor.name, "{} takes {} bytes, not {}", describe(tensor), bytes, tensor.size_bytes);
}

Result<std::vector<TensorInfo>> parse_safetensors(std::span<const std::byte> header,
                                                  std::uint64_t header_bytes,
                                                  std::uint64_t file_bytes) {
  const std::uint64_t data_start = kLengthBytes + header_bytes;
  const auto* text = reinterpret_cast<const char*>(header.data());
  bool too_much = false;
  std::size_t tensors_seen = 0;
  const auto look = [&](int depth, Json::parse_event_t event, Json& /*parsed*/) {
    tensors_seen += depth == 1 && event == Json::parse_event_t::key ? 1U : 0U;
    too_much = too_much || depth > kMaxDepth || tensors_seen > kMaxTensors;
    return !too_much;  // What is left out is not kept.
  };
  const Json root = Json::parse(text, text + header.size(), look, false);
  if (too_much) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "its header is nested deeper than {} or has more than {} tensors",
                         kMaxDepth, kMaxTensors);
  }
  if (!root.is_object()) {
    return KVFERRY_ERROR(kInvalidArgument, "its header of {} bytes is no JSON object",
                         header.size());
  }
  std::vector<TensorInfo> tensors;
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") continue;
    KVFERRY_ASSIGN(auto tensor, parse_tensor(name, entry, data_start, file_bytes - data_start));
    tensors.push_back(std::move(tensor));
  }
  std::sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.offset, a.name) < std::tie(b.offset, b.name);
  });
  std::uint64_t end = data_start;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset != end) {
      return bad(tensor.name, "it starts at byte {} of the file, the one before it ends at {}",
                 tensor.offset, end);
    }
    end += tensor.size_bytes;
  }
  if (end != file_bytes) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "its tensors end at byte {}, the file at {}: it was cut off, or is none",
                         end, file_bytes);
  }
  return tensors;
}

Status check_header_size(std::uint64_t header_bytes, std::uint64_t file_bytes) {
  if (file_bytes >= kLengthBytes && header_bytes <= kMaxHeaderBytes &&
      header_bytes <= file_bytes - kLengthBytes) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "a header of {} bytes in a file of {}: it is no safetensors file",
                       header_bytes, file_bytes);
}

Result<SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& file) {
  const std::string name = file.string();
  // Not a pipe or a terminal, whose reads may wait for ever.
  ipc::UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd.valid()) return KVFERRY_ERRNO("weights file {}", name);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("weights file {}", name);
  if (!S_ISREG(info.st_mode)) {
    return KVFERRY_ERROR(kInvalidArgument, "weights file {}: it is no regular file", name);
  }
  const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
  SafetensorsFile opened(std::move(fd), name, {});
  std::array<std::byte, kLengthBytes> length{};
  if (file_bytes < kLengthBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "weights file {}: {} bytes are no safetensors file",
                         name, file_bytes);
  }
  KVFERRY_TRY(opened.read(0, length));
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, length.data(), length.size());
  const auto named = [&name](ipc::Error error) {
    error.message = fmt::format("weights file {}: {}", name, error.message);
    return error;
  };
  if (const Status checked = check_header_size(header_bytes, file_bytes); !checked) {
    return named(checked.error());
  }
  std::vector<std::byte> header(header_bytes);
  KVFERRY_TRY(opened.read(kLengthBytes, header));
  auto tensors = parse_safetensors(header, header_bytes, file_bytes);
  if (!tensors) return named(tensors.error());
  opened.tensors_ = std::move(tensors).value();
  opened.header_bytes_ = header_bytes;
  opened.size_bytes_ = file_bytes;
  return opened;
}

Status SafetensorsFile::read(std::uint64_t offset, std::span<std::byte> target) const {
  std::size_t done = 0;
  while (done < target.size()) {
    const ssize_t got = ::pread(fd_.get(), target.data() + done, target.size() - done,
                                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return KVFERRY_ERRNO("weights file {}", name_);
    if (got == 0) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "weights file {} ends at byte {}, {} more were expected: it was cut off "
                           "meanwhile",
                           name_, offset + done, target.size() - done);
    }
    done += static_cast<std::size_t>(got);
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
