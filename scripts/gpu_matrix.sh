#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# The fault matrix of copy jobs and clears on GPUs (docs/reliability.md), from a folder of built binaries.
# Every GPU runs cells of its own, one after another: each cell compares the GPU's free memory before
# and after it, as the driver tells a process that has no part in it.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: gpu_matrix.sh --bin DIR [--out DIR] [--devices "0 1"] [--every N] [--only REGEX] [--seconds N] [--pool SIZE]

  --bin DIR       holds kvferry, job_matrix and kvferry_job_engine
  --out DIR       logs and reports (default: a new folder under /tmp)
  --devices LIST  ordinals of GPUs that nobody else uses meanwhile (default 0)
  --every N       every N-th cell only (default 1)
  --only REGEX    only cells whose name matches
  --seconds N     begin no cell later than that (default 500)
  --pool SIZE     host memory of each cell's manager, which its mover pins (default 256MiB)
TXT
}

bin="" out="" devices=0 every=1 only=. seconds=500 pool=256MiB
while (($#)); do
  case $1 in
    --bin) bin=$(realpath "$2"); shift 2 ;;
    --out) out=$2; shift 2 ;;
    --devices) devices=$2; shift 2 ;;
    --every) every=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --pool) pool=$2; shift 2 ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu-matrix.XXXXXX)
mkdir -p "$out"

export KVFERRY_MATRIX_PROGRAM=$bin/kvferry KVFERRY_MATRIX_GEOMETRY=llama-3-8b KVFERRY_MATRIX_POOL=$pool
mapfile -t cells < <("$bin/job_matrix" --gtest_list_tests | awk '/^[^ ]/ { suite = $1 } /^  / { print suite $1 }' |
  awk -F/ -v only="$only" '$NF ~ only' | awk -v step="$every" '(NR - 1) % step == 0')
read -ra gpus <<< "$devices"

# Cell after cell in processes of their own: the next one begins only while there is time.
shard() { # GPU, its place among them
  local i
  for ((i = $2; i < ${#cells[@]}; i += ${#gpus[@]})); do
    ((SECONDS < seconds)) || break
    # Only this GPU is to be seen: a process takes a little memory of every one that it can see.
    CUDA_VISIBLE_DEVICES=$1 KVFERRY_MATRIX_DEVICE=cuda:0 KVFERRY_MATRIX_REPORT=$out/$1.jsonl \
      KVFERRY_MATRIX_UNDISTURBED=$out/$1.undisturbed \
      "$bin/job_matrix" --gtest_filter="${cells[i]}" >> "$out/$1.log" 2>&1 || true
  done
}
pids=()
for place in "${!gpus[@]}"; do
  shard "${gpus[place]}" "$place" &
  pids+=($!)
done
wait "${pids[@]}"

python3 - "$out" "${#cells[@]}" << 'END'
import collections
import glob
import json
import re
import sys

out, listed = sys.argv[1], int(sys.argv[2])
cells = [json.loads(line) for path in glob.glob(out + "/*.jsonl") for line in open(path)]
log = "".join(open(path, errors="replace").read() for path in sorted(glob.glob(out + "/*.log")))
passed = set(re.findall(r"\[       OK \] \S*/(\S+) \(", log))
skipped = set(re.findall(r"\[  SKIPPED \] \S*/(\S+) \(", log))
started = set(re.findall(r"\[ RUN      \] \S*/(\S+)", log))
failures = sorted(started - passed - skipped)
blows = ["kill", "stop", "stop_for_good", "delay", "fail", "orphan"]
times = collections.defaultdict(list)
for cell in cells:
    times[(cell["victim"], cell["blow"])].append(cell["ms"])
print("| victim: cells, ms to the answer (median, longest) | " + " | ".join(b.replace("_", " ") for b in blows) + " |")
print("|---" * (len(blows) + 1) + "|")
for victim in ["manager", "worker", "mover", "engine"]:
    row = []
    for blow in blows:
        ms = sorted(times.get((victim, blow), []))
        row.append("%d: %d, %d" % (len(ms), ms[len(ms) // 2], ms[-1]) if ms else "–")
    print("| %s | %s |" % (victim, " | ".join(row)))
for name in failures:
    print("FAILED", name)
print("%d cells counted, %d passed, %d failed, %d not applicable, %d not begun; logs in %s"
      % (len(cells), len(passed), len(failures), len(skipped), listed - len(started), out))
sys.exit(bool(failures) or not passed)
END
