// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client_link.hpp"
#include "kvferry/worker/client.hpp"

#include <cstdint>
#include <utility>

namespace kvferry::worker {

class Client::Impl {
 public:
  Impl(ClientOptions options, ipc::RuntimeDir dir) : link(std::move(options), std::move(dir)) {}
  ClientLink link;
  std::uint64_t last_use = 0;  ///< Of a layer slot, that it has handed out.
};

}  // namespace kvferry::worker
