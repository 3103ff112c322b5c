// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// The image of new weights that messages bring piece by piece: a file in memory, for whoever reads
/// weights from files. One at a time. @threading one thread.
class WeightsUpload {
 public:
  /// A part of another upload begins anew; one that is there already is no error. kProtocol for one
  /// that leaves a gap or goes beyond the image.
  [[nodiscard]] Status take(const WeightsPart& part);
  /// The file's path for this process. kNotFound when not all of that upload is there.
  [[nodiscard]] Result<std::string> complete(std::string_view upload) const;
  void drop() noexcept;

 private:
  [[nodiscard]] Status begin(const WeightsPart& part);

  UniqueFd file_;
  Digest upload_;
  std::uint64_t total_ = 0;
  std::uint64_t received_ = 0;
};

}  // namespace kvferry::ipc
