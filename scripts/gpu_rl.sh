#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# RL loops on a GPU, from a folder of built binaries: the model against its CPU twin, every mode with and
# without emptying against the driver's free memory, releases and resumes of everything, weights that other
# processes lend or messages bring or rank 0 broadcasts, and clears of a large arena with the first decode graph
# replayed after each. Works on a machine that has only a driver.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: gpu_rl.sh --bin DIR [--out DIR] [--iterations N] [--large-cycles N] [--large-blocks N] [--only REGEX]

  --bin DIR         holds kvferry, device_cuda_model_test, device_cuda_broadcast_test, kvferry_broadcast_peer
  --out DIR         logs, reports and drawings (default: a new folder under /tmp)
  --iterations N    of each loop (default 200)
  --large-cycles N  clears and re-inits of the large arena (default 200)
  --large-blocks N  its blocks of 2 MiB (default 32768: 64 GiB)
  --only REGEX      only the runs whose name matches

Broadcasts need NCCL: without libnccl.so.2 where the linker looks, give its folder in LD_LIBRARY_PATH.

Example, after a build with the preset "cuda":
  scripts/gpu_rl.sh --bin build/cuda/gpu
TXT
}

bin="" out="" iterations=200 large_cycles=200 large_blocks=32768 only=.
while (($#)); do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --iterations) iterations=$2; shift 2 ;;
    --large-cycles) large_cycles=$2; shift 2 ;;
    --large-blocks) large_blocks=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu-rl.XXXXXX)
mkdir -p "$out"

rows=() loops=()
failed=0
used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{sum += $1} END {print sum}'; }
run() { # name, command...
  local name=$1; shift
  [[ $name =~ $only ]] || return 0
  local start=$SECONDS rc=0
  timeout -k 10 300 "$@" >"$out/$name.log" 2>&1 || rc=$?
  ((rc == 0)) || failed=$((failed + 1))
  rows+=("$(printf '%-26s rc %-3s %4ss   device memory used after: %s MiB' "$name" "$rc" $((SECONDS - start)) "$(used_mib)")")
}

export KVFERRY_REQUIRE_GPU=1
run model "$bin/device_cuda_model_test"
loop() { # name, options...
  local name=$1; shift
  [[ $name =~ $only ]] || return 0
  loops+=("$name")
  rm -f "$out/$name.json" # Of an earlier run.
  [[ $* == *--device* ]] || set -- --device cuda:0 "$@"
  run "$name" "$bin/kvferry" rl-loop --geometry llama-3-8b --report "$out/$name.json" \
    --plot "$out/$name.svg" "$@"
}
for mode in abort retract in_place; do
  loop "rl-$mode" --mode "$mode" --iterations "$iterations" --weights-size 512MiB
  loop "rl-$mode-never-emptied" --mode "$mode" --iterations "$iterations" --weights-size 512MiB --no-empty-cache
done
loop rl-release --release --iterations "$iterations" --weights-size 512MiB
# Two ranks: each on a GPU of its own, or both on one, which NCCL takes for GPUs of two hosts then.
apart=(--ranks 2)
if (($(nvidia-smi -L | grep -c '^GPU ') > 1)); then
  apart+=(--device "cuda:0,1")
else
  apart+=(--device cuda:0 --worker-environment "NCCL_HOSTID=rank-{rank},NCCL_SOCKET_IFNAME=lo")
fi
run broadcast "$bin/device_cuda_broadcast_test"
for mode in abort retract in_place; do
  for emptied in "" -never-emptied; do
    options=(--mode "$mode" --iterations "$iterations" --weights-size 64MiB)
    [[ -z $emptied ]] || options+=(--no-empty-cache)
    loop "rl-tensor-$mode$emptied" --update tensor "${options[@]}"
    loop "rl-broadcast-$mode$emptied" --update distributed "${apart[@]}" "${options[@]}"
  done
done
loop rl-broadcast-large --update distributed "${apart[@]}" --iterations 20 --weights-size 512MiB
loop rl-broadcast-release --update distributed "${apart[@]}" --release --iterations 20 --weights-size 512MiB
loop rl-messages --update distributed --ranks 2 --weights-broadcast messages --iterations 20 --weights-size 512MiB
for handles in vmm legacy; do
  loop "rl-ipc-$handles" --update ipc --handles "$handles" --iterations "$iterations" --weights-size 512MiB
done
loop rl-ipc-ranks --update ipc --ranks 2 --mode in_place --iterations 20 --weights-size 512MiB
loop rl-ipc-clear --update ipc --ranks 2 --clear --cache-owner mover --iterations 20 --weights-size 512MiB
loop rl-ipc-release --update ipc --release --iterations 20 --weights-size 512MiB
loop rl-ipc-never-emptied --update ipc --no-empty-cache --iterations 20 --weights-size 512MiB
loop rl-clear-large --clear --iterations "$large_cycles" --gpu-blocks "$large_blocks" --weights-size 64MiB

run components bash "$(dirname "$0")/gpu_components.sh" --bin "$bin"
[[ ! -e $out/components.log ]] || cat "$out/components.log"
run lent-weights bash "$(dirname "$0")/gpu_lent_weights.sh" --bin "$bin"
[[ ! -e $out/lent-weights.log ]] || cat "$out/lent-weights.log"

((${#loops[@]} == 0)) || python3 "$(dirname "$0")/rl_table.py" "$out" "${loops[@]}"
printf '%s\n' "${rows[@]}"
echo "logs: $out"
exit "$((failed > 0))"
