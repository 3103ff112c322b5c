// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/write_policy.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Digest;
using ipc::GroupId;

std::string_view to_string(WriteMode mode) noexcept {
  switch (mode) {
    case WriteMode::kWriteThrough: return "write-through";
    case WriteMode::kSelective: return "selective";
    case WriteMode::kWriteBack: return "write-back";
  }
  return "write-through";
}

ipc::Result<WriteMode> parse_write_mode(std::string_view text) {
  for (const WriteMode mode : kWriteModes) {
    if (text == to_string(mode)) return mode;
  }
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of write-through|selective|write-back",
                       text);
}

WritePolicy::WritePolicy(WritePolicyOptions options) : options_(options) {
  options_.uses = std::max(options_.uses, 1U);
  options_.remembered = std::max<std::size_t>(options_.remembered, 1);
}

bool WritePolicy::on_filled(GroupId group, const Digest& hash) {
  switch (options_.mode) {
    case WriteMode::kWriteThrough: return true;
    case WriteMode::kSelective: return count_use(group, hash);
    case WriteMode::kWriteBack: return false;
  }
  return false;
}

// With write-through it is one whose store failed or was dropped: the next use tries again.
bool WritePolicy::on_hit(GroupId group, const Digest& hash) { return on_filled(group, hash); }

bool WritePolicy::on_evicting(GroupId /*group*/, const Digest& /*hash*/) const noexcept {
  return options_.mode == WriteMode::kWriteBack;
}

void WritePolicy::forget() {
  recent_.clear();
  older_.clear();
}

bool WritePolicy::count_use(GroupId group, const Digest& hash) {
  // One table for all groups: a block's hash is the same in each.
  const Digest name =
      Digest::from_words(hash.high() ^ ((group.value + 1ULL) * 0x9E3779B97F4A7C15ULL), hash.low());
  if (recent_.size() >= options_.remembered && !recent_.contains(name)) {
    older_ = std::exchange(recent_, {});
  }
  std::uint32_t& uses = recent_[name];
  if (const auto before = older_.extract(name); !before.empty()) uses += before.mapped();
  uses = std::min(uses + 1, options_.uses);
  return uses >= options_.uses;
}

}  // namespace kvferry::worker
