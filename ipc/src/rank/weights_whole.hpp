// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "rank/weights_upload.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// The file of new weights that rank 0 reads for all ranks: open from the first part that is asked
/// for until the update is over, so that whoever puts another file in its place meanwhile does not
/// give rank 0 other weights than the rest. @threading one thread.
class WeightsWhole {
 public:
  /// The part at that offset, empty behind its end. kNotFound, kPermission and kInvalidArgument
  /// name the file.
  [[nodiscard]] Result<WeightsPart> read(const RankWeightsRead& wanted);
  /// The path of this file when it is known by that name, else of that upload.
  [[nodiscard]] Result<std::string> location(const WeightsUpload& uploads,
                                             std::string_view upload) const;
  void drop() noexcept;

 private:
  [[nodiscard]] Status open(const RankWeightsRead& wanted);

  UniqueFd file_;
  Digest upload_;
  std::uint64_t total_ = 0;
};

}  // namespace kvferry::ipc
