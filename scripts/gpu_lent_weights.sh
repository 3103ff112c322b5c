#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: gpu_lent_weights.sh --bin DIR
#
# On a GPU: an engine of two ranks takes weights that another process lends in device memory, once by each
# kind of handle, then everything is released and resumed. Says what the driver counts as used after each.
# Fails when a command does, when the memory of a lender that has ended is not back, or when a release
# leaves more than the processes' contexts.
#
#   --bin DIR  holds kvferry
set -euo pipefail
[[ ${1:-} == --bin && -n ${2:-} ]] || { sed -n 's/^# \{0,1\}//; 4,12p' "$0" >&2; exit 2; }
bin=$2
dir=$(mktemp -d /tmp/kvferry-lent.XXXXXX)
processes=()
finish() {
  local process
  for process in "${processes[@]}"; do kill "$process" 2> /dev/null || true; done
  wait
  rm -rf "$dir"
}
trap finish EXIT

python3 - "$dir" <<'PY'
import json, os, struct, sys
for name in ("first", "second"):
    size = 256 << 20
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2 // 4096, 4096], "data_offsets": [0, size]}}).encode()
    with open(os.path.join(sys.argv[1], name), "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(os.urandom(1 << 20) * (size >> 20))
PY

where=(--runtime-dir "$dir/run" --instance lent)
start() { # name, command...
  local name=$1
  shift
  "$bin/kvferry" "$@" "${where[@]}" > "$dir/$name.out" 2> "$dir/$name.log" &
  processes+=($!)
}
ask() {
  echo "\$ kvferry $*"
  "$bin/kvferry" "$@" "${where[@]}"
}
used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{sum += $1} END {print sum}'; }
until_said() { # what, file
  local until=$((SECONDS + 60))
  until grep -q "$1" "$2" 2> /dev/null; do
    ((SECONDS < until)) || { tail -n 5 "$dir"/*.log; echo "'$1' was not said"; exit 1; }
    sleep 0.1
  done
}

before=$(used_mib)
start manager manager --host-memory 256MiB
for rank in 0 1; do
  common=(--rank "$rank" --ranks 2 --device cuda:0 --geometry llama-3-8b --gpu-blocks 512)
  start "mover-$rank" mover "${common[@]}"
  start "worker-$rank" worker "${common[@]}" --serve --weights "$dir/first"
done
until=$((SECONDS + 60))
until "$bin/kvferry" status --json "${where[@]}" 2> /dev/null | tee "$dir/status" | grep -q '"offload_ready":true'; do
  ((SECONDS < until)) || { tail -n 5 "$dir"/*.log; cat "$dir/status"; exit 1; }
  sleep 0.2
done
ask pause
started=$(used_mib)
for handles in vmm legacy; do
  start "lender-$handles" export-weights --name trainer --file "$dir/second" --device cuda:0 --handles "$handles"
  lender=${processes[-1]}
  until_said lends "$dir/lender-$handles.out"
  echo "used with a lender ($handles): $(used_mib) MiB"
  ask update-weights --from ipc --source trainer --empty-cache
  kill "$lender"
  wait "$lender"
  echo "used after its end: $(used_mib) MiB, $started before it came"
  (($(used_mib) <= started)) || { echo "a lender's memory is not back"; exit 1; }
done
ask release
released=$(used_mib)
echo "used while everything is released: $released MiB, $before before anything started"
ask resume
ask continue
echo "used after the resume: $(used_mib) MiB"
# Five processes' contexts, of which each takes about half a GiB.
((released - before < 5 * 700)) || { echo "a release left device memory"; exit 1; }
