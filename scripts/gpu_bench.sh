#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Benchmarks on a GPU, from a folder with the built command: transfers of scattered chunks by every strategy,
# beside the link and bare copies of the same run, caches of models, block-first arenas, latencies, and what else
# "kvferry bench" measures. Works on a machine that has only a driver.
set -euo pipefail

usage() {
  cat <<'TXT'
usage: gpu_bench.sh --bin DIR [--out DIR] [--repeats N] [--only REGEX]

  --bin DIR     holds kvferry
  --out DIR     tables and JSON (default: a new folder under /tmp)
  --repeats N   of each measurement (default 5)
  --only REGEX  only the runs whose name matches: chunks, small-chunks, block-first, small-jobs, models,
                tensor-parallel, interference, interference-kernels, layers, ablation, pool, engine, idle

Example, after a build with the preset "cuda":
  scripts/gpu_bench.sh --bin build/cuda/cli
TXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin="" out="" repeats=5 only=.
while (($#)); do
  case $1 in
    --bin) bin=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --repeats) repeats=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
[[ -n $bin ]] || { usage >&2; exit 2; }
[[ -n $out ]] || out=$(mktemp -d /tmp/kvferry-gpu-bench.XXXXXX)
mkdir -p "$out"

failed=0
bench() { # name, arguments...; limit: seconds
  local name=$1 start=$SECONDS rc=0
  shift
  [[ $name =~ $only ]] || return 0
  timeout -k 10 "${limit:-300}" "$bin/kvferry" bench --device cuda:0 --repeats "$repeats" --json "$@" \
    >"$out/$name.json" 2>"$out/$name.log" || rc=$?
  ((rc == 0)) || failed=$((failed + 1))
  printf '%-14s rc %-3s %4ss\n' "$name" "$rc" $((SECONDS - start))
  ((rc == 0)) || tail -n 5 "$out/$name.log"
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
bench chunks transfer latency --chunk-size 16KiB,32KiB,64KiB
bench small-chunks transfer --chunk-size 4KiB,8KiB --blocks 64
bench block-first transfer latency --arena block-first --chunk-size 32KiB --no-bare
bench small-jobs latency --geometry llama-3-8b --blocks 1,4,16 --strategy auto,staged,strided,kernel,agent
# The example has fp8 keys and values with scales, a window and a draft layer.
bench block-first-interference interference --arena block-first --chunk-size 32KiB,128KiB --blocks 16,64 \
  --load decode --pairs 10 --direction d2h,h2d --strategy direct --no-bare
bench models transfer --geometry "llama-3-8b,deepseek-v3,$root/docs/geometry.example.toml" --blocks 1,4,16,64,512 \
  --locality random,sequential --no-bare --strategy auto
bench tensor-parallel transfer --geometry llama-3-70b --ranks 4 --blocks 1,4,16,64,512 --no-bare --strategy auto
bench interference interference --load decode,gemm,skinny,hbm --pairs 10 --direction d2h,h2d --strategy auto,staged --no-bare
bench interference-kernels interference --load decode,gemm --pairs 10 --direction d2h,h2d --blocks 1,16 \
  --strategy kernel,agent --no-bare
bench layers layers --geometry llama-3-8b,deepseek-v3 --blocks 16,64,256 --samples 30
bench layers-block-first layers --geometry llama-3-8b --arena block-first --blocks 16,64,256 --samples 30
bench ablation ablation interference --geometry llama-3-8b --blocks 1,16,64 --direction d2h,h2d \
  --strategy staged,strided,batch --load decode --pairs 10 --no-bare
limit=600 bench pool pool --pool-size 64GiB
bench idle idle --geometry llama-3-8b
bench engine submit lookup clear --entries 1000000
"${PYTHON:-python3}" - "$out" <<'END'
import glob
import json
import os
import sys

for path in sorted(glob.glob(os.path.join(sys.argv[1], "*.json"))):
    try:
        report = json.load(open(path, encoding="utf-8"))
    except ValueError:
        continue
    name = os.path.basename(path)[: -len(".json")]
    limit = report["limit"]
    print("\n%s: %s" % (name, report["device"]) + "".join(
        "  %s %.1f" % (way, limit[way]) for way in ("d2h", "h2d", "both") if limit[way]))
    for r in report["results"]:
        what = "%s KiB x %d" % (r["chunk_bytes"] / 1024, r["regions"])
        if r["load"]:
            what += " beside " + r["load"]
        if r["gbps"] is not None:
            share = "%5.1f %%" % (100 * r["share"]) if r["share"] is not None else "      -"
            figure = "%6.2f GB/s %s" % (r["gbps"], share)
            if r["cpu_ms_per_gib"] is not None:
                figure += "  %6.1f CPU ms/GiB" % r["cpu_ms_per_gib"]
            if r["slowdown"] is not None:
                figure += "  slowdown %.3f, p50 %.3f, p99 %.3f" % (
                    r["slowdown"], r["itl_p50_ratio"], r["itl_p99_ratio"])
                if r["itl_p99_ratio_low"] is not None:
                    figure += " (%.3f to %.3f)" % (r["itl_p99_ratio_low"], r["itl_p99_ratio_high"])
                if r["copy_gbps"] is not None:
                    figure += ", %.1f %% of one copy's" % (100 * r["gbps"] / r["copy_gbps"])
                if r["slowdown_beyond_copy"] is not None:
                    figure += ", beyond one copy %.3f, p99 %.3f" % (
                        r["slowdown_beyond_copy"], r["itl_p99_beyond_copy"])
            if r["us"] is not None:
                figure += "  %.1f us, p99 %.1f" % (r["us"], r["us_p99"])
            if r["recovery_us"] is not None:
                figure += "  back after %.1f ms, blocks %s" % (
                    r["recovery_us"] / 1000, "kept" if r["arena_kept"] else "lost")
        elif r["core_share"] is not None:
            figure = "%.3f %% of a core" % (100 * r["core_share"])
        else:
            figure = "%8.1f us, p99 %.1f" % (r["us"], r["us_p99"])
            if r["per_second"]:
                figure += ", %.0f/s" % r["per_second"]
        print("  %-12s %-4s %-20s %4d blocks  %-6s %-12s %s" % (
            r["bench"], r["direction"], r["geometry"] or what, r["blocks"], r["path"], r["strategy"], figure))
END
echo
echo "reports under $out; $failed runs failed"
exit "$failed"
