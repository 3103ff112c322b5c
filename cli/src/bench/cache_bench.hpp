// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// What an engine pays for each job: the time in its submitting call, and how many jobs a second
/// come back with as many under way as it may have. Throws Exception, as the next two.
void bench_submit(BenchContext& context, const BenchShape& shape);

/// How long an engine waits until it knows which blocks of a prefix of 1,000 are there, in an index
/// of BenchConfig::entries that were stored in any order.
void bench_lookup(BenchContext& context);

/// Clear and re-init of an idle arena of BenchConfig::pool_bytes, beside the bare calls of one
/// process for memory of that size.
void bench_clear(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
