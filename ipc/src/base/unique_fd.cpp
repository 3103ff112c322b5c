// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/unique_fd.hpp"

#include <unistd.h>

namespace kvferry::ipc {

UniqueFd::~UniqueFd() {
  // Linux closes the descriptor even when close reports EINTR: never retry.
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace kvferry::ipc
