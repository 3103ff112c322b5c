# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by scripts that run an engine on a GPU, on a machine that may have only a driver. Takes their
# `--bin DIR`, sets `bin` and `dir`, a folder that goes with every process at the end, and expects `where`
# to name the instance.

set -euo pipefail
[[ ${1:-} == --bin && -n ${2:-} ]] || {
  awk 'NR > 3 { if (!/^#/ || /^# shellcheck/) exit; sub(/^# ?/, ""); print }' "$0" >&2
  exit 2
}
bin=$2
dir=$(mktemp -d /tmp/kvferry-gpu.XXXXXX)
where=()
processes=()

end_all() {
  local process
  for process in "${processes[@]}"; do kill "$process" 2> /dev/null || true; done
  wait
  processes=()
}
trap 'end_all; rm -rf "$dir"' EXIT

# Starts a process of the instance; its output is in $dir/NAME.out and .log.
start() { # name, command...
  local name=$1
  shift
  : > "$dir/$name.out" # What an earlier one of the name said is not taken for its own.
  "$bin/kvferry" "$@" "${where[@]}" > "$dir/$name.out" 2> "$dir/$name.log" &
  processes+=($!)
}

# Ends the one that was started last, in order.
end_last() {
  kill "${processes[-1]}"
  wait "${processes[-1]}"
  unset 'processes[-1]'
}

ask() { "$bin/kvferry" "$@" "${where[@]}"; }

# Ends the script with the last words of all processes.
die() {
  tail -n 5 "$dir"/*.log
  echo "${0##*/}: $*"
  exit 1
}

until_said() { # what, file
  local until=$((SECONDS + 60))
  until grep -q "$1" "$2" 2> /dev/null; do
    ((SECONDS < until)) || die "'$1' was not said"
    sleep 0.1
  done
}

until_offload_ready() {
  local until=$((SECONDS + 60))
  until ask status --json 2> /dev/null | tee "$dir/status" | grep -q '"offload_ready":true'; do
    ((SECONDS < until)) || die "offload is not ready: $(cat "$dir/status")"
    sleep 0.2
  done
}

# What the driver counts, of all processes.
used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{sum += $1} END {print sum}'; }

# A safetensors file of random bytes.
write_weights() { # file, tensors, MiB of each
  python3 - "$@" << 'PY'
import json, os, struct, sys
path, count, mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
size = mib << 20
header = {"layer.%d" % i: {"dtype": "BF16", "shape": [size // 2 // 4096, 4096], "data_offsets": [i * size, (i + 1) * size]}
          for i in range(count)}
text = json.dumps(header).encode()
with open(path, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.write(os.urandom(1 << 20) * (count * mib))
PY
}
