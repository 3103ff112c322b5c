// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"

namespace kvferry::cli {

/// How soon the successor of a manager that was killed answers, and finds what that one had stored:
/// BenchConfig::entries of the smallest blocks that outlive a manager. Throws Exception.
void bench_restart(BenchContext& context);

}  // namespace kvferry::cli
