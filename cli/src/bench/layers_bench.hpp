// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// Loads that the worker computes on while they come, layer by layer, and stores that follow the
/// compute, through whole instances: how long after the submit the first layer is usable and all of
/// them are, and the same for a load, or a step, that is awaited first. Adds figures to the report.
/// Throws Exception, also when a block held anything but what it should.
void bench_layers(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
