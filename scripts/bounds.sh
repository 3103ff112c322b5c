#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/bounds.sh [--rounds N] [--jobs N] [--preset NAME]
#
# Measures how long the waits of the unlink handshake take when a peer is dead, stopped, or does not
# drain, with the deadlines as they are by default (tests/multiproc/lease_bounds_test.cpp, on simulated
# devices), and compares with what is stated (docs/reliability.md). Takes about 10 s a round.
#
#   --rounds N     how often (default 3)
#   --jobs N       measurements at a time (default: twice the processors; most of the time they wait)
#   --preset NAME  which build (default: release)
#   --help         this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

rounds=3 jobs=$((2 * $(job_count))) preset=release
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --rounds | --jobs | --preset)
      (($# > 1)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done

out=$root/build/bounds
rm -rf "$out"
mkdir -p "$out"
build_with_tests "$preset" lease_bounds_test > "$out/build.log" ||
  die "the build failed; see build/bounds/build.log"
cd "$root/build/$preset/tests/multiproc"
pids=() failed=0
for ((shard = 0; shard < jobs; ++shard)); do
  GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard KVFERRY_BOUNDS_DEFAULTS=1 \
    KVFERRY_BOUNDS_ROUNDS=$rounds KVFERRY_BOUNDS_REPORT=$out/report.jsonl \
    ./lease_bounds_test > "$out/$shard.log" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  wait "$pid" || failed=1
done
((failed == 0)) || grep -hE '^\[  FAILED  \]|: Failure' "$out"/*.log || true

python3 - "$out/report.jsonl" << 'END'
import collections
import json
import statistics
import sys

rows = collections.defaultdict(list)
for line in open(sys.argv[1], encoding="utf-8"):
    taken = json.loads(line)
    rows[taken["row"]].append(taken)
width = max(len(row) for row in rows)
print(f"{'what':<{width}}  {'runs':>4}  {'stated':>8}  {'p50':>8}  {'max':>8}")
for row, runs in rows.items():
    took = [run["took_ms"] for run in runs]
    stated = max(run["bound_ms"] for run in runs)
    print(f"{row:<{width}}  {len(runs):>4}  {stated:>5} ms  {statistics.median(took):>5.0f} ms  {max(took):>5.0f} ms")
# What the calls and the scheduler add: a deadline passes before anything is done about it.
late = sum(run["took_ms"] > run["bound_ms"] + 250 for runs in rows.values() for run in runs)
print(f"{sum(map(len, rows.values()))} measurements, {late} later than stated by more than 250 ms")
END
exit "$failed"
