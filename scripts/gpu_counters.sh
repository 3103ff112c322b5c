#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Hardware counters of a GPU while blocks are copied: what copies take of its memory and of the bus, and why a
# kernel beside them takes longer. Needs ncu, PyTorch, the right to read counters, and nobody else on the GPU;
# leaves clocks and caches as they are.
usage() {
  cat <<'TEXT'
usage: gpu_counters.sh --bin DIR [--out DIR]
  --bin DIR  holds kvferry
  --out DIR  counters (default: a new folder under /tmp)

example:
  scripts/gpu_counters.sh --bin build/cuda/cli
TEXT
}
set -euo pipefail

bin="" out=""
while (($#)); do
  case $1 in
    --bin) bin=$(realpath "$2"); shift 2 ;;
    --out) out=$2; shift 2 ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu-counters.XXXXXX)
mkdir -p "$out"
here=$(cd "$(dirname "$0")" && pwd)

bytes=dram__bytes_read.sum,dram__bytes_write.sum,pcie__read_bytes.sum,pcie__write_bytes.sum
count() { # name, what is counted, ncu's options and command...
  local name=$1 metrics=$2; shift 2
  timeout 240 ncu --replay-mode kernel --cache-control none --clock-control none --csv --log-file "$out/$name.csv" \
    --metrics "gpu__time_duration.sum,$metrics" "$@" > "$out/$name.log" 2>&1 ||
    { tail -n 20 "$out/$name.log" >&2; exit 1; }
}
count load "$bytes" --target-processes application-only --nvtx --kernel-name regex:reduce \
  python3 "$here/gpu_counters.py" load "$bin/kvferry"
ring() { # name, kernel, direction
  count "$1" "$bytes,lts__t_bytes.sum,launch__grid_size" --target-processes all --launch-skip 40 --launch-count 40 \
    --kernel-name-base mangled --kernel-name "regex:$2" \
    "$bin/kvferry" bench transfer --no-bare --chunk-size 32KiB --blocks 64 --strategy staged --direction "$3" \
    --repeats 1 --bytes 4GiB
}
ring gather 'block_copy_kernelILb1' d2h
ring scatter 'block_copy_kernelILb0' h2d
python3 "$here/gpu_counters.py" report "$out"
