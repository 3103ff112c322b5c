// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// A host pool of BenchConfig::pool_bytes, as a manager makes it and a mover registers it, in this
/// process alone: how long until it is filled, registered, and given back. Throws Exception.
void bench_pool(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
