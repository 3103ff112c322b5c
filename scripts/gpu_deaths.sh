#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# How soon memory is back when processes are killed under traffic on a GPU, with a host pool that is full and
# pinned (docs/reliability.md), from a folder of built binaries. Fails where it takes longer than 1 s, 35 ms for
# each GiB that the victim had pinned, and 200 ms for each GiB that nobody is left to hold.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: gpu_deaths.sh --bin DIR [--pools "SIZE..."] [--out DIR] [--device cuda:0]

  --bin DIR       holds kvferry, multiproc_pool_death_test and kvferry_job_engine
  --pools LIST    sizes of the host pool, one run each (default "2GiB 8GiB 32GiB")
  --out DIR       logs (default: a new folder under /tmp)
  --device ID     which GPU; nobody else uses it meanwhile (default cuda:0)
TXT
}

bin="" out="" pools="2GiB 8GiB 32GiB" device=cuda:0
while (($#)); do
  case $1 in
    --bin) bin=$(realpath "$2"); shift 2 ;;
    --out) out=$2; shift 2 ;;
    --pools) pools=$2; shift 2 ;;
    --device) device=$2; shift 2 ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu-deaths.XXXXXX)
mkdir -p "$out"

export KVFERRY_MATRIX_PROGRAM=$bin/kvferry KVFERRY_MATRIX_GEOMETRY=llama-3-8b KVFERRY_MATRIX_DEVICE=$device
read -ra sizes <<< "$pools"
((${#sizes[@]})) || { usage >&2; exit 2; }
failed=0
for size in "${sizes[@]}"; do
  KVFERRY_MATRIX_POOL=$size "$bin/multiproc_pool_death_test" > "$out/$size.log" 2>&1 || failed=$((failed + 1))
  grep '^killed ' "$out/$size.log" || true
  grep -E '^\[  FAILED  \].*ms\)$' "$out/$size.log" || true
done
if ((failed)); then
  echo "$failed of ${#sizes[@]} runs failed; logs in $out"
  exit 1
fi
echo "all memory was back in time; logs in $out"
