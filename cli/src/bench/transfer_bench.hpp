// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// The link, then transfers and latencies of one cache: bare ones, and by every strategy through
/// an instance. Throws Exception.
void bench_transfers(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
