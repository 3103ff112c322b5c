// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::worker {

/// One tensor of a file: where its bytes lie, in row-major order.
struct TensorInfo {
  std::string name;
  std::string dtype;  ///< As the file says: "BF16", "F32", "U8" and so on.
  std::vector<std::uint64_t> shape;
  std::uint64_t offset = 0;  ///< From the file's start.
  std::uint64_t size_bytes = 0;
};

/// "BF16 [4096, 1024]".
[[nodiscard]] std::string describe(const TensorInfo& tensor);
/// So much of a name as fits a message.
[[nodiscard]] std::string_view shown(std::string_view name);
/// kInvalidArgument unless dtype and shape are known and take size_bytes.
[[nodiscard]] ipc::Status check_tensor(const TensorInfo& tensor);
/// Of all of the tensor, whatever its size_bytes says; kInvalidArgument as check_tensor().
[[nodiscard]] ipc::Result<std::uint64_t> size_of(const TensorInfo& tensor);

/// The header of a safetensors file, in the order of the tensors' bytes: eight bytes of its length,
/// JSON, then the tensors without gap or overlap
/// (https://github.com/huggingface/safetensors, "Format"). Errors (kInvalidArgument) name what is
/// wrong. file_bytes: of the whole file. Pure.
[[nodiscard]] ipc::Result<std::vector<TensorInfo>> parse_safetensors(
    std::span<const std::byte> header, std::uint64_t header_bytes, std::uint64_t file_bytes);

/// kInvalidArgument unless a file of that size can begin with a header of that one.
[[nodiscard]] ipc::Status check_header_size(std::uint64_t header_bytes, std::uint64_t file_bytes);

/// An open safetensors file. @threading one at a time.
class SafetensorsFile {
 public:
  /// kNotFound, kPermission, kInvalidArgument: every error names the file.
  [[nodiscard]] static ipc::Result<SafetensorsFile> open(const std::filesystem::path& file);

  static constexpr std::uint64_t kHeaderStart = 8;

  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] std::uint64_t header_bytes() const noexcept { return header_bytes_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  /// Reads from the file's start on; kSystem with what the kernel said, kInvalidArgument when the
  /// file has become shorter.
  [[nodiscard]] ipc::Status read(std::uint64_t offset, std::span<std::byte> target) const;

 private:
  SafetensorsFile(ipc::UniqueFd fd, std::string name, std::vector<TensorInfo> tensors)
      : fd_(std::move(fd)), name_(std::move(name)), tensors_(std::move(tensors)) {}

  ipc::UniqueFd fd_;
  std::string name_;
  std::vector<TensorInfo> tensors_;
  std::uint64_t header_bytes_ = 0;
  std::uint64_t size_bytes_ = 0;
};

}  // namespace kvferry::worker
