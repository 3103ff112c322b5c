// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bare_copies.hpp"
#include "bench/context.hpp"
#include "bench/figure.hpp"

namespace kvferry::cli {

/// Adds to what is known of the link, of a benchmark and of the whole report: BenchConfig::repeats
/// times one large copy of each way. Throws Exception.
void measure_link(BenchContext& context, BareCopies& copies, LinkLimit& limit);

}  // namespace kvferry::cli
