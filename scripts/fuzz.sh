#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/fuzz.sh [--seconds N | --minutes N | --each-minutes N] [--target NAME]... [--jobs N] [--grow] [--list]
#        scripts/fuzz.sh --pack DIR
#        scripts/fuzz.sh --binaries DIR [--seconds N | --minutes N | --each-minutes N] [--target NAME]... [--jobs N]
#
# Builds the fuzz targets of tests/fuzz with clang and runs them, one line per target. The exit code
# is the number of targets with a finding; each finding is a file under build/fuzz/findings, its
# report is in build/fuzz/logs. Inputs that reach something new are kept in build/fuzz/corpus for the
# next run; the committed corpus is only read.
#
#   --seconds N    for all targets together [60]; none gets more than that
#   --minutes N    the same in minutes
#   --each-minutes N
#                  for each target
#   --target NAME  this target only; may be given several times
#   --jobs N       targets that run at the same time [one per processor]
#   --grow         afterwards, choose the committed corpus anew: the smallest inputs that reach the
#                  most, of it, of this run's and of what the real encoders write
#   --pack DIR     builds, and copies the targets with the libraries that they need into DIR
#   --binaries DIR runs the targets of such a folder, on a machine without compiler and libraries
#   --list         the names of the targets
#   --help         this text
#
# Once a finding is mended, its file goes to tests/fuzz/corpus/TARGET/regression-WHAT.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

corpus=tests/fuzz/corpus
work=build/fuzz
most_files=30
most_bytes=2048

mapfile -t targets < <(basename -s .cpp tests/fuzz/*.cpp | grep -vx seeds)
selected=()
seconds=60
of_each=0
jobs=$(job_count)
grow=false
pack=
binaries=
while (($#)); do
  case $1 in
    --seconds | --minutes | --each-minutes | --jobs)
      [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || die "$1 needs a number of at least 1"
      case $1 in
        --jobs) jobs=$2 ;;
        --minutes) seconds=$((60 * $2)) ;;
        --each-minutes) of_each=$((60 * $2)) ;;
        *) seconds=$2 ;;
      esac
      shift 2
      ;;
    --pack | --binaries)
      [[ -n ${2:-} ]] || die "$1 needs a folder"
      folder=$2
      [[ $folder == /* ]] || folder=$caller_directory/$folder
      if [[ $1 == --pack ]]; then pack=$folder; else binaries=$folder; fi
      shift 2
      ;;
    --target)
      (($# > 1)) || die "--target needs the name of a target"
      [[ " ${targets[*]} " == *" $2 "* ]] || die "no target '$2'; targets: ${targets[*]}"
      selected+=("$2")
      shift 2
      ;;
    --grow) grow=true && shift ;;
    --list) printf '%s\n' "${targets[@]}" && exit ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done
((${#selected[@]})) || selected=("${targets[@]}")
[[ -z $binaries || -d $binaries ]] || die "no folder $binaries"
[[ -z $binaries ]] || { [[ -z $pack ]] && ! $grow; } || die "--binaries builds nothing: no --pack, no --grow"

mkdir -p "$work/logs" "$work/findings"
rm -f "$work/logs/probe.log"
# Some targets write a file per input: in memory, where there is such a place.
scratch_base=$root/$work
[[ ! -w /dev/shm ]] || scratch_base=/dev/shm
TMPDIR=$(mktemp -d "$scratch_base/kvferry-fuzz-XXXXXX")
trap 'rm -rf "$TMPDIR"' EXIT
export TMPDIR UBSAN_OPTIONS=print_stacktrace=1
# The system's own clang first: it gets along with its standard library.
find_clang() {
  local candidate
  for candidate in clang++ clang++-18 clang++-14; do
    if echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }' |
      "$candidate" -fsanitize=fuzzer,address -x c++ - -o "$TMPDIR/probe" 2>> "$work/logs/probe.log"; then
      command -v "$candidate"
      return
    fi
  done
  die "no clang here links a fuzz target (see $work/logs/probe.log); run scripts/setup.sh"
}

build() { # clang
  local -a fresh=()
  local cache=$work/CMakeCache.txt
  # With another compiler, CMake would forget what the preset says.
  if [[ -f $cache ]] && ! grep -qx "CMAKE_CXX_COMPILER:[A-Z]*=$1" "$cache"; then
    fresh=(--fresh)
  fi
  cmake --preset fuzz "${fresh[@]}" -DCMAKE_CXX_COMPILER="$1" || return
  local -a names=("${selected[@]/#/fuzz_}")
  if $grow; then names+=(kvferry_fuzz_seeds); fi
  cmake --build "$work" --parallel "$(job_count)" --target "${names[@]}"
}

with=()
if [[ -n $binaries ]]; then
  programs=$binaries
  with=(env "LD_LIBRARY_PATH=$binaries/lib")
else
  programs=$work/tests/fuzz
  clang=$(find_clang)
  build "$clang" > "$work/logs/build.log" 2>&1 || {
    tail -n 60 "$work/logs/build.log" >&2
    die "the build failed"
  }
fi

# The programs with their lines compressed, and every library but the C library's own.
pack_targets() {
  local target
  mkdir -p "$pack/lib"
  for target in "${selected[@]}"; do
    objcopy --compress-debug-sections=zlib "$programs/fuzz_$target" "$pack/fuzz_$target"
    ldd "$programs/fuzz_$target"
  done | awk '$3 ~ /^\// && $1 !~ /^(libc|libm|libpthread|libresolv|ld-linux.*)\.so/ { print $3 }' |
    sort -u | xargs -r cp -L -t "$pack/lib"
  echo "$pack: ${#selected[@]} targets, $(du -sh "$pack" | cut -f 1); run scripts/fuzz.sh --binaries with it"
}
if [[ -n $pack ]]; then
  pack_targets
  exit
fi

# What a run may use; max_len leaves room for several parts of a message.
limits=(-timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=64 -max_len=8192)

statistic() { # log name
  sed -n "s/^stat::$2: *//p" "$1" | tail -n 1
}

run_target() { # target seconds
  local target=$1 program=$programs/fuzz_$1 log=$work/logs/$1.log code=0 finding
  rm -f "$work/findings/$target-"*
  mkdir -p "$work/corpus/$target" "$corpus/$target"
  "${with[@]}" "$program" "${limits[@]}" -max_total_time="$2" -print_final_stats=1 -close_fd_mask=3 \
    -artifact_prefix="$work/findings/$target-" "$work/corpus/$target" "$corpus/$target" \
    > "$log" 2>&1 || code=$?
  printf '%-16s %11s executions  %6s edges  ' "$target" \
    "$(statistic "$log" number_of_executed_units)" \
    "$(sed -n 's/.* cov: \([0-9]*\) .*/\1/p' "$log" | tail -n 1)"
  if ((code == 0)); then
    echo "no finding"
    return
  fi
  finding=$(find "$work/findings" -name "$target-*" | head -n 1)
  # Once more, with all that the program itself has to say.
  [[ -z $finding ]] || "${with[@]}" "$program" "${limits[@]}" "$finding" >> "$log" 2>&1 || true
  echo "FINDING ${finding:-(no input)}, see $log"
  return 1
}

# Each gets the same share of the processors' time.
each=$((seconds * jobs / ${#selected[@]}))
((each > 0)) || each=1
((each <= seconds)) || each=$seconds
((of_each == 0)) || each=$of_each
failed=0
running=0
for target in "${selected[@]}"; do
  if ((running == jobs)); then
    wait -n || failed=$((failed + 1))
    running=$((running - 1))
  fi
  run_target "$target" "$each" &
  running=$((running + 1))
done
for ((; running > 0; running--)); do
  wait -n || failed=$((failed + 1))
done

# The features of each input are in the control file of a merge: edges, each with how often it was
# taken. Edges count first.
choose() { # control most_files destination
  python3 - "$@" << 'END'
import pathlib
import shutil
import sys

control, most, destination = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
lines = open(control, encoding="utf-8").read().splitlines()
count = int(lines[0])
paths = [pathlib.Path(line) for line in lines[2 : 2 + count]]
reached = {}
for line in lines[2 + count :]:
    kind, index, *features = line.split()
    if kind == "FT":
        reached[int(index)] = {int(feature) for feature in features}
chosen = []
for unit in (8, 1):
    seen = {feature // unit for index in chosen for feature in reached[index]}
    while len(chosen) < most:
        left = [index for index in reached if index not in chosen]
        gain = {i: len({f // unit for f in reached[i]} - seen) for i in left}
        best = max(left, key=lambda i: (gain[i], -paths[i].stat().st_size), default=None)
        if best is None or gain[best] == 0:
            break
        chosen.append(best)
        seen |= {feature // unit for feature in reached[best]}
contents = [(paths[index].name, paths[index].read_bytes()) for index in chosen]
for old in destination.iterdir():
    if not old.name.startswith("regression-"):
        old.unlink()
for name, data in contents:
    if not (destination / name).exists():
        (destination / name).write_bytes(data)
print(f"{destination}: {len(contents)} inputs of {count}")
END
}

grow_target() { # target
  local pool=$work/pool/$1
  rm -rf "$pool"
  mkdir -p "$pool/in" "$pool/out"
  find "$work/corpus/$1" "$corpus/$1" "$work/seeds/$1" -type f -size "-${most_bytes}c" \
    -exec cp -t "$pool/in" {} + 2> /dev/null || true
  "$work/tests/fuzz/fuzz_$1" "${limits[@]}" -merge=1 -set_cover_merge=1 -close_fd_mask=3 \
    -merge_control_file="$pool/control" "$pool/out" "$pool/in" > "$work/logs/$1-merge.log" 2>&1
  choose "$pool/control" "$most_files" "$corpus/$1"
}

if $grow; then
  ((failed == 0)) || die "not growing a corpus with findings"
  rm -rf "$work/seeds"
  "$work/tests/fuzz/kvferry_fuzz_seeds" "$work/seeds"
  for target in "${selected[@]}"; do
    grow_target "$target"
  done
fi
exit "$failed"
