// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/link.hpp"

#include "must.hpp"

namespace kvferry::cli {

void measure_link(BenchContext& context, BareCopies& copies, LinkLimit& limit) {
  for (const Way way : {Way::kToHost, Way::kToDevice, Way::kBoth}) {
    must(copies.limit(way));  // the first one warms up
    for (std::uint32_t i = 0; i < context.config().repeats; ++i) {
      const double gbps = must(copies.limit(way));
      limit.of(way).add(gbps);
      context.report.limit.of(way).add(gbps);
    }
    context.check_interrupted();
  }
}

}  // namespace kvferry::cli
