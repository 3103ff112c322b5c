#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/rl_runs.sh [--bin DIR] [--out DIR] [--iterations N] [--cycles N] [--only REGEX]
#
# The long runs of `kvferry rl-loop` on the host backend, no GPU needed: every mode with weights from every
# source, with and without emptying, two ranks; releases and resumes of everything; and clears and re-inits
# under traffic on four ranks. A table says what memory and times came to, and its slopes. The exit code is
# the number of runs that failed.
#
#   --bin DIR       holds kvferry (default: build/release/cli, which scripts/test.sh builds)
#   --out DIR       reports, drawings and logs (default: build/rl-runs)
#   --iterations N  of each loop (default 200)
#   --cycles N      of the run with clears on four ranks (default 2000)
#   --only REGEX    only the runs whose name matches
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

bin=build/release/cli out=build/rl-runs iterations=200 cycles=2000 only=.
while (($#)); do
  case $1 in
    --bin | --out | --iterations | --cycles | --only)
      (($# > 1)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done
given() { # a folder, as the caller means it
  case $1 in
    /*) echo "$1" ;;
    *) echo "$caller_directory/$1" ;;
  esac
}
if [[ $bin == build/release/cli ]]; then bin=$root/$bin; else bin=$(given "$bin"); fi
if [[ $out == build/rl-runs ]]; then out=$root/$out; else out=$(given "$out"); fi
[[ -x $bin/kvferry ]] || die "$bin/kvferry is not there: build it, or name its folder with --bin"
mkdir -p "$out"
[[ -z $(ls -A "$out") || -e $out/.rl-runs ]] || die "$out holds other things: name an empty folder"
touch "$out/.rl-runs"
# Of earlier runs, which would stand in the table.
rm -f "$out"/*.json

failed=0 runs=()
loop() { # name, options...
  local name=$1 started=$SECONDS code=0
  shift
  [[ $name =~ $only ]] || return 0
  runs+=("$name")
  "$bin/kvferry" rl-loop --device host --geometry tiny --weights-size 16MiB --report "$out/$name.json" \
    --plot "$out/$name.svg" "$@" > "$out/$name.log" 2>&1 || code=$?
  ((code == 0)) || failed=$((failed + 1))
  printf '%-32s exit code %d, %4d s\n' "$name" "$code" "$((SECONDS - started))"
}

for mode in abort retract in_place; do
  for update in disk tensor distributed ipc; do
    common=(--mode "$mode" --update "$update" --ranks 2 --iterations "$iterations")
    loop "$mode-$update" "${common[@]}"
    loop "$mode-$update-never-emptied" "${common[@]}" --no-empty-cache
  done
done
loop release --release --ranks 2 --iterations "$iterations"
loop clear-4-ranks --clear --ranks 4 --iterations "$cycles"
((${#runs[@]} > 0)) || die "no run's name matches '$only'"
python3 scripts/rl_table.py "$out" "${runs[@]}"
exit "$failed"
