#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/ratios.sh [--bin DIR] [--attempts N]
#
# Swaps on simulated devices against one large memcpy of the same run, through all processes, by every way of
# copying: fails when a median of the shares is below a third of what it is on an idle machine of two
# processors. For what got slower by mistake (a notice that nobody is woken for, a copy for each slice), not for
# figures: those are docs/performance.md's. A machine may be busy, so the best of N attempts counts (default 3).
#
#   --bin DIR     holds kvferry (default: build/release/cli)
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bin=$root/build/release/cli attempts=3
while (($#)); do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --attempts) attempts=$2; shift 2 ;;
    --help | -h) print_help; exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done
[[ -x $bin/kvferry ]] || die "no kvferry in $bin: build the release preset"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for ((attempt = 1; attempt <= attempts; ++attempt)); do
  timeout -k 10 120 "$bin/kvferry" bench transfer --device host --chunk-size 32KiB --blocks 16 \
    --strategy staged,strided,batch,memcpy,agent --direction d2h,h2d --no-bare --repeats 5 --json \
    > "$work/$attempt.json" 2> "$work/$attempt.log" || {
    tail -n 20 "$work/$attempt.log" >&2
    die "the benchmark failed"
  }
  if python3 "$root/scripts/ratios.py" "$work"/*.json; then exit 0; fi
done
exit 1
