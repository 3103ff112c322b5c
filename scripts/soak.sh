#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/soak.sh [--cycles N] [--minutes M] [--seed N] [--owner worker|mover|both]
#                        [--handles vmm|legacy] [--device host|cuda:N] [--ranks N] [--report FILE.json]
#                        [--preset NAME | --bin DIR] [-- more options of kvferry_soak]
#
# Clears and re-creates the caches of real processes again and again, under traffic that swaps blocks
# out and in and verifies every word, while random processes are killed and stopped at random moments
# (tests/soak/, described in docs/reliability.md). Ends with a table of what was seen and what it is
# held to; the exit code is not zero when any figure fails.
#
#   --cycles N     how often (default: 10000)
#   --minutes M    end each run after so long, with however many cycles
#   --seed N       victims and moments repeat from it (default: 1)
#   --owner WHO    who owns the arena: worker, mover, or one run for each (default: both)
#   --handles H    how it is shared (default: vmm)
#   --device D     simulated devices, or a GPU (default: host)
#   --ranks N      a worker and a mover each (default: 1)
#   --report FILE  figures and series as JSON; with both owners FILE-worker.json and FILE-mover.json
#   --preset NAME  which build (default: release)
#   --bin DIR      use kvferry, kvferry_soak and libkvferry_heap.so there, build nothing
#   --help         this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cycles=10000 minutes=0 seed=1 owner=both handles=vmm device=host ranks=1 report='' preset=release bin=''
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --cycles | --minutes | --seed | --owner | --handles | --device | --ranks | --report | --preset | --bin)
      (($# > 1)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --)
      shift
      break
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done
case $owner in
  both) owners=(worker mover) ;;
  worker | mover) owners=("$owner") ;;
  *) die "--owner '$owner' is none of worker, mover, both" ;;
esac
[[ -z $report || $report == /* ]] || report=$caller_directory/$report

if [[ -z $bin ]]; then
  mkdir -p build
  build_with_tests "$preset" kvferry kvferry_soak > build/soak-build.log ||
    die "the build failed; see build/soak-build.log"
  soak=$(find "build/$preset" -name kvferry_soak -type f) program=$(find "build/$preset" -name kvferry -type f)
else
  [[ $bin == /* ]] || bin=$caller_directory/$bin
  soak=$bin/kvferry_soak program=$bin/kvferry
  heap=$bin/libkvferry_heap.so
  if [[ " $* " != *" --heap-library"[\ =]* ]]; then
    [[ -f $heap ]] || die "no $heap: nobody's live heap would be counted"
    set -- --heap-library "$heap" "$@"
  fi
fi
[[ -x $soak && -x $program ]] || die "no kvferry_soak or no kvferry"

failed=0
for who in "${owners[@]}"; do
  options=(--program "$program" --cycles "$cycles" --minutes "$minutes" --seed "$seed" --owner "$who"
    --handles "$handles" --device "$device" --ranks "$ranks")
  if [[ -n $report ]]; then
    file=$report
    ((${#owners[@]} == 1)) || file=${report%.json}-$who.json
    options+=(--report "$file")
  fi
  "$soak" "${options[@]}" "$@" || failed=$((failed + 1))
done
exit "$failed"
