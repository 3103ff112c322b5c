// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// What copies cost the compute of a worker beside them: each load of the config runs in the
/// worker's process all the time, and copies come and go. One large copy of another process is
/// measured the same way: what is no worse than that costs nothing.
void bench_interference(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
