#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/mutants.sh [--preset NAME]
#
# Runs real processes of kvferry with a mistake built in, one at a time, through a story that leads to
# it (tests/mutants/), and prints which rule caught it. The rules see nothing but what processes recorded
# and what the kernel tells. The same stories without a mistake have to break none. Fails when a mistake
# is not caught, or by another rule than its own.
#
#   --preset NAME  which build (default: release)
#   --help         this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

preset=release
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --preset)
      (($# > 1)) || die "$1 needs a value"
      preset=$2
      shift 2
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done

out=$root/build/mutants
rm -rf "$out"
mkdir -p "$out"
build_with_tests "$preset" lease_mutants_test job_mutants > "$out/build.log" ||
  die "the build failed; see build/mutants/build.log"
cd "$root/build/$preset/tests/multiproc"
# Most of the time they wait.
shards=4 failed=0 pids=()
for program in lease_mutants_test job_mutants; do
  for ((shard = 0; shard < shards; ++shard)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard "./$program" > "$out/$program.$shard.log" 2>&1 &
    pids+=($!)
  done
done
for pid in "${pids[@]}"; do
  wait "$pid" || failed=1
done
sed -nE 's/.*(mutant [a-z_]+: caught by .*)/\1/p' "$out"/*.log | LC_ALL=C sort
sed -nE 's/.*\[  FAILED  \] [^ ]*\/([a-z_]+), where.*\([0-9]+ ms\)$/FAILED \1/p' "$out"/*.log | LC_ALL=C sort
caught=$(cat "$out"/*.log | grep -c '^mutant ' || true)
quiet=$(cat "$out"/*.log | grep -c '^story ' || true)
echo "$caught mistakes caught by their rules, $quiet stories without one break none; logs in build/mutants"
# Each of them is one line, or a failure.
cases=$(for program in lease_mutants_test job_mutants; do
  "./$program" --gtest_list_tests
done | grep -c '^  ')
((failed == 0 && caught + quiet == cases)) || die "$((cases - caught - quiet)) of $cases did not come to that"
