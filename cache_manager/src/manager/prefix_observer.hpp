// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/block_key.hpp"

namespace kvferry::cache_manager {

/// Is told what becomes visible in the prefix index, and what visible blocks go. It must not call
/// the index back from within.
class PrefixObserver {
 public:
  virtual ~PrefixObserver() = default;
  /// @param before the block that it continues; zero: none, or that is not known
  virtual void stored(const ipc::BlockKey& key, const ipc::Digest& before) = 0;
  virtual void removed(const ipc::BlockKey& key) = 0;
  /// After removed() of each of its blocks: all of the root has been dropped at once.
  virtual void emptied(const ipc::Digest& root) = 0;
};

}  // namespace kvferry::cache_manager
