// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// Processor time of each process of an instance that has moved blocks and has nothing to do now,
/// as a share of one core. The engine is this process, whose thread is its own affair. Throws
/// Exception.
void bench_idle(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
