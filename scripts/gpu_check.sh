#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Runs everything that needs a GPU, from a folder of built binaries: the backend's tests, also under
# compute-sanitizer, then the main job over both owners, both handle kinds, all arena orders and an engine's
# own memory. Works on a machine that has only a driver.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: gpu_check.sh --bin DIR [--out DIR] [--trace FILE] [--requests N] [--devices cuda:0[,1]] [--ranks R] [--only REGEX] [--without-sanitizer]

  --bin DIR       holds kvferry, device_cuda_{conformance,borrow,model}_test, kvferry_device_peer,
                  cache_manager_data_order_cuda_test,
                  multiproc_{layers,engine_shares,hand_over,store_units}_cuda_test and kvferry_layers_{engine,load}_child
  --out DIR       logs and reports (default: a new folder under /tmp)
  --trace FILE    what to replay (default: the generated workload)
  --requests N    how much of it (default 300)
  --devices LIST  as for kvferry replay (default cuda:0)
  --ranks R       tensor-parallel ranks (default 2)
  --only REGEX    only the runs whose name matches
  --without-sanitizer  where there is no compute-sanitizer; else that is a failure

Example, after a build with the preset "cuda":
  scripts/gpu_check.sh --bin build/cuda/gpu
TXT
}

bin="" out="" trace="" requests=300 devices=cuda:0 ranks=2 only=. wants_sanitizer=true
while (($#)); do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --trace) trace=$2; shift 2 ;;
    --requests) requests=$2; shift 2 ;;
    --devices) devices=$2; shift 2 ;;
    --ranks) ranks=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --without-sanitizer) wants_sanitizer=false; shift ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu.XXXXXX)
mkdir -p "$out"

rows=()
failed=0
used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{sum += $1} END {print sum}'; }

run() { # name, command...
  local name=$1; shift
  [[ $name =~ $only ]] || return 0
  local start=$SECONDS rc=0
  timeout -k 10 180 "$@" >"$out/$name.log" 2>&1 || rc=$?
  ((rc == 0)) || failed=$((failed + 1))
  rows+=("$(printf '%-34s rc %-3s %4ss   device memory used after: %s MiB' "$name" "$rc" $((SECONDS - start)) "$(used_mib)")")
}

export KVFERRY_REQUIRE_GPU=1
run conformance "$bin/device_cuda_conformance_test"
run borrowed "$bin/device_cuda_borrow_test"
run model "$bin/device_cuda_model_test"
run data_order "$bin/cache_manager_data_order_cuda_test"
export KVFERRY_PROGRAM=$bin/kvferry
for test in layers engine_shares hand_over store_units; do
  run "$test" "$bin/multiproc_${test}_cuda_test"
done

# The toolkit's own checker, where there is one: out-of-bounds and misaligned accesses, and reads of memory
# that nobody wrote. Errors of calls are what some tests are about. Of a peer's reads it cannot say
# anything: it does not see what the other process has written.
sanitizer=$(command -v compute-sanitizer || true)
[[ -n $sanitizer || ! -x /usr/local/cuda/bin/compute-sanitizer ]] || sanitizer=/usr/local/cuda/bin/compute-sanitizer
if [[ -n $sanitizer ]]; then
  # It takes device memory for itself, so that tests which compare the driver's counts are left out.
  filter='-*KilledImporterPinsNothing*:*ReleaseGivesTheMemoryBack*:*ImporterKeepsReferenceCounted*'
  # initcheck looks at a copy's source before the call returns, so that a copy behind a word never gets that
  # word from the thread that makes both; and of 3D copies it does not see what they have written.
  # Of 9 GiB not all is written.
  written="$filter:*StreamWords*:*RowsMayLieFurtherApart*:*BeyondFourGibibytes*"
  for test in conformance borrow model; do
    run "memcheck-$test" "$sanitizer" --tool memcheck --target-processes all --report-api-errors no --error-exitcode 9 \
      "$bin/device_cuda_${test}_test" --gtest_filter="$filter"
    run "initcheck-$test" "$sanitizer" --tool initcheck --target-processes application-only --report-api-errors no \
      --error-exitcode 9 "$bin/device_cuda_${test}_test" --gtest_filter="$written"
  done
elif [[ $wants_sanitizer == true && memcheck-conformance =~ $only ]]; then
  rows+=("compute-sanitizer                  is not installed here: see --without-sanitizer")
  failed=1
fi

replay() { # name, options...
  local name=$1; shift
  local input=()
  [[ -z $trace ]] || input=(--trace "$trace")
  run "$name" "$bin/kvferry" replay "${input[@]}" --requests "$requests" --device "$devices" --ranks "$ranks" \
    --geometry llama-3-8b --verify full --clear-every 60 --report "$out/$name.json" "$@"
}
for owner in worker mover; do
  for handles in vmm legacy; do
    replay "replay-$owner-$handles" --cache-owner "$owner" --handles "$handles"
  done
done
replay replay-block-first --arena block-first
replay replay-batch --copy-strategy batch
replay replay-kernel --copy-strategy kernel
replay replay-agent --copy-strategy agent
replay replay-strided --copy-strategy strided
replay replay-strided-many-allocations --copy-strategy strided --arena layer-first-many
replay replay-many-allocations --arena layer-first-many
for handles in vmm legacy; do
  replay "replay-engine-memory-$handles" --arena-memory engine --arena layer-first-many --handles "$handles"
done

python3 - "$out" <<'PY'
import glob, json, os, sys
keys = ["requests", "hits_device", "hits_host", "blocks_verified", "blocks_corrupt", "clears", "reinits",
        "leaked_device_bytes", "leaked_host_bytes", "leftover_names", "restarts"]
print("%-28s %s" % ("run", " ".join("%9s" % k.replace("blocks_", "").replace("leaked_", "leak_").replace("_bytes", "")[:9] for k in keys)))
for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.json"))):
    try:
        report = json.load(open(path))
    except ValueError as error:
        print(path, error)
        continue
    print("%-28s %s" % (os.path.basename(path)[:-5], " ".join("%9s" % report.get(k) for k in keys)),
          "clear p50/p99/max %s" % "/".join("%.1f" % report["clear_ms"][q] for q in ("p50", "p99", "max")),
          "reinit %s ms" % "/".join("%.1f" % report["reinit_ms"][q] for q in ("p50", "p99", "max")))

# Free memory around every clear: as the ranks said, and as the driver told a process beside them.
MIB = 1 << 20
print("\n%-28s %5s %-8s %10s %21s %21s %s" % ("MiB free at each clear", "clear", "device", "arena", "before: said / seen", "after: said / seen", "difference after"))
for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.json"))):
    try:
        report = json.load(open(path))
    except ValueError:
        continue
    for number, clear in enumerate(report.get("clear_memory", []), 1):
        for d in clear["devices"]:
            print("%-28s %5d %-8s %10.1f %10.1f %10.1f %10.1f %10.1f %d B%s" % (
                os.path.basename(path)[:-5], number, d["device"], d["arena_bytes"] / MIB,
                d["free_before"] / MIB, d["seen_free_before"] / MIB, d["free_after"] / MIB, d["seen_free_after"] / MIB,
                d["seen_free_after"] - d["free_after"], " (a process ended or started)" if clear["disturbed"] else ""))
PY
printf '%s\n' "${rows[@]}"
if ((failed)); then
  echo "$failed failed; logs in $out"
  exit 1
fi
echo "all passed; logs in $out"
