// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// Two engines of one instance with workers and movers of their own: what the first one (prefill)
/// stores, the second one (decode) loads, while it is being stored, and when all of it is. From the
/// first block's store until the second engine has seen the completion of all loads. Adds figures
/// to the report. Throws Exception, also when what came is not what was computed.
void bench_hand_over(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
