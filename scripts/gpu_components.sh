#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: gpu_components.sh --bin DIR
#
# On a GPU: an engine of one rank whose weights are resident, offloaded as a whole or layer by layer. After an
# update from disk and one from a lender it says what the driver counts as used and what `kvferry components`
# shows, then releases the decode graph. Fails when a command does, or when weights that are not resident leave
# more than their packed tables with the driver.
#
#   --bin DIR  holds kvferry
set -euo pipefail
[[ ${1:-} == --bin && -n ${2:-} ]] || { sed -n 's/^# \{0,1\}//; 4,11p' "$0" >&2; exit 2; }
bin=$2
dir=$(mktemp -d /tmp/kvferry-components.XXXXXX)
processes=()
end_all() {
  local process
  for process in "${processes[@]}"; do kill "$process" 2> /dev/null || true; done
  wait
  processes=()
}
trap 'end_all; rm -rf "$dir"' EXIT

python3 - "$dir" <<'PY'
import json, os, struct, sys
layers, each = 8, 64 << 20
for name in ("first", "second"):
    header = {"layer.%d" % i: {"dtype": "BF16", "shape": [each // 2 // 4096, 4096], "data_offsets": [i * each, (i + 1) * each]}
              for i in range(layers)}
    text = json.dumps(header).encode()
    with open(os.path.join(sys.argv[1], name), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(os.urandom(1 << 20) * (layers * each >> 20))
PY

used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{sum += $1} END {print sum}'; }
until_said() { # what, file
  local until=$((SECONDS + 60))
  until grep -q "$1" "$2" 2> /dev/null; do
    ((SECONDS < until)) || { tail -n 5 "$dir"/*.log; echo "'$1' was not said"; exit 1; }
    sleep 0.1
  done
}
declare -A after
for strategy in resident offloaded layerwise; do
  where=(--runtime-dir "$dir/$strategy" --instance parts)
  ask() { "$bin/kvferry" "$@" "${where[@]}"; }
  start() { # name, command...
    local name=$1
    shift
    "$bin/kvferry" "$@" "${where[@]}" > "$dir/$name.out" 2> "$dir/$name.log" &
    processes+=($!)
  }
  start manager manager --host-memory 256MiB
  common=(--device cuda:0 --geometry llama-3-8b --gpu-blocks 64)
  start mover mover "${common[@]}"
  start worker worker "${common[@]}" --serve --weights "$dir/first" --weights-strategy "$strategy" --log-level info
  until=$((SECONDS + 60))
  until ask status --json 2> /dev/null | grep -q '"offload_ready":true'; do
    ((SECONDS < until)) || { tail -n 5 "$dir"/*.log; exit 1; }
    sleep 0.2
  done
  echo "== $strategy: used $(used_mib) MiB after the start"
  ask pause > /dev/null
  ask update-weights --file "$dir/second" > /dev/null
  after[$strategy]=$(used_mib)
  echo "   used ${after[$strategy]} MiB after an update of 512 MiB from disk"
  start lender export-weights --name trainer --file "$dir/first" --device cuda:0
  until_said lends "$dir/lender.out"
  ask update-weights --from ipc --source trainer > /dev/null
  kill "${processes[-1]}"
  wait "${processes[-1]}"
  unset 'processes[-1]'
  echo "   used $(used_mib) MiB after one that was lent"
  shown=$(ask components | awk '$2 == "weights" { print $5, $6 }')
  case $strategy in
    resident) [[ $shown == "512.0 MiB" ]] || { echo "resident weights have $shown on the device"; exit 1; } ;;
    *) [[ $shown == "0 B" ]] || { echo "$strategy weights have $shown on the device"; exit 1; } ;;
  esac
  ask continue --no-empty-cache > /dev/null
  ask components --release decode_graph
  ask components --release weights | tail -n +2
  grep -h 'component weights' "$dir/worker.log" | sed 's/^/   /' || true
  end_all
done
((after[resident] - after[offloaded] >= 512 && after[resident] - after[layerwise] >= 512)) ||
  { echo "weights that are not resident are still on the device"; exit 1; }
