#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/matrix.sh [--only REGEX] [--jobs N] [--preset NAME]
#
# Strikes every transition of the unlink handshake with every fault, in both ownership roles and with
# both kinds of handles, on real processes (tests/matrix/, described in docs/reliability.md). Prints a
# table of what survivors reached and in which time, the cells that do not apply with the reason, and
# the cells that failed. A cell counts only when its fault has struck at its point.
#
#   --only REGEX   cells whose name matches, for example attacher_import.*orphan
#   --jobs N       cells at a time (default: twice the processors; most of the time they wait)
#   --preset NAME  which build (default: dev)
#   --help         this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

only='' preset=dev jobs=$((2 * $(job_count)))
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --only | --jobs | --preset)
      (($# > 1)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done

out=$root/build/matrix
cmake --preset "$preset" > /dev/null
cmake --build --preset "$preset" --target lease_matrix --parallel "$(job_count)" > "$root/build/matrix-build.log" ||
  die "the build failed; see build/matrix-build.log"
rm -rf "$out"
mkdir -p "$out"
cd "$root/build/$preset/tests/multiproc"
filter=$(./lease_matrix --gtest_list_tests | sed -n 's/^  \([^ ]*\).*/\1/p' | grep -E -- "${only:-.}" |
  sed 's:^:Cells/LeaseMatrix.:' | paste -sd:)
[[ -n $filter ]] || die "no cell matches '$only'"

started=$SECONDS pids=()
for ((shard = 0; shard < jobs; ++shard)); do
  GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard KVFERRY_MATRIX_REPORT=$out/$shard.jsonl \
    ./lease_matrix --gtest_filter="$filter" > "$out/$shard.log" 2>&1 &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
  wait "$pid" || failed=1
done

python3 - "$out" $((SECONDS - started)) << 'END' || failed=1
import collections
import glob
import json
import re
import sys

out, seconds = sys.argv[1], sys.argv[2]
cells = [json.loads(line) for path in glob.glob(out + "/*.jsonl") for line in open(path)]
log = "".join(open(path, errors="replace").read() for path in sorted(glob.glob(out + "/*.log")))
runs = set(re.findall(r"\[ RUN      \] \S*\.(\S+)|$", log)) - {""}
passed = set(re.findall(r"\[       OK \] \S*/(\S+) \(", log))
reasons = collections.Counter(re.findall(r"Skipped\n(.+)\n", log))
skipped = set(re.findall(r"\[  SKIPPED \] \S*/(\S+) \(", log))
failures = sorted(set(re.findall(r"\[  FAILED  \] \S*/(\S+?), where", log)))
started = set(re.findall(r"\[ RUN      \] \S*/(\S+)", log))
unfinished = sorted(started - passed - skipped - set(failures))

words = {
    "cleared": "cleared", "quarantined": "quarantined", "let_go": "let go",
    "victim_goes_on": "goes on", "both_dead": "both dead",
}
blows = ["kill", "stop", "stop_for_good", "delay", "fail", "orphan"]
table = collections.defaultdict(list)
for cell in cells:
    point = cell["point"] + ("" if cell["occurrence"] == 1 else " #%d" % cell["occurrence"])
    table[(point, cell["blow"])].append(cell)
print("| point | " + " | ".join(blow.replace("_", " ") for blow in blows) + " |")
print("|---" * (len(blows) + 1) + "|")
for point in sorted({point for point, _ in table}):
    row = []
    for blow in blows:
        here = table.get((point, blow), [])
        if not here:
            row.append("–")
            continue
        outcomes = sorted({words[cell["outcome"]] for cell in here})
        row.append("%d: %s, %d ms" % (len(here), " or ".join(outcomes), max(cell["ms"] for cell in here)))
    print("| %s | %s |" % (point, " | ".join(row)))
print()
for reason, count in reasons.most_common():
    print("not applicable (%d cells): %s" % (count, reason))
for name in failures + unfinished:
    print("FAILED", name)
print("%d cells counted, %d passed, %d failed, %d not applicable, %s s; logs in %s"
      % (len(cells), len(passed), len(failures) + len(unfinished), len(skipped), seconds, out))
sys.exit(bool(failures or unfinished or len(passed) != len(cells)))
END
exit "$failed"
