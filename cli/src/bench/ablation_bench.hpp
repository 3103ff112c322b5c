// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// What a mover of its own costs and buys: the same jobs through an instance, and by a worker that
/// does its own copies, each by every strategy that both have; and what the death of what copies
/// takes along. Throws Exception.
void bench_ablation(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
