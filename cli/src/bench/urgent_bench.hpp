// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/shape.hpp"

namespace kvferry::cli {

/// An urgent load of one block, alone and while loads of so many blocks of a job are under way all
/// the time, through whole instances: from its submit until the engine has seen its completion.
/// Adds figures to the report. Throws Exception.
void bench_urgent(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
