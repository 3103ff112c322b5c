#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/matrix.sh [--only REGEX] [--every N] [--jobs N] [--preset NAME]
#
# Strikes every transition of the unlink handshake and of copy jobs with every fault, in both ownership
# roles and with both kinds of handles, on real processes (tests/matrix/, described in
# docs/reliability.md). Prints a table of what survivors reached and in which time, the cells that do
# not apply with the reason, and the cells that failed. A cell counts only when its fault has struck at
# its point. Without --only, the code has to make every move of ipc/src/transitions/relation.inc here or
# in a few tests beside it, but for those that tests/matrix/moves.txt lists with a reason.
#
#   --only REGEX   cells whose name matches, for example attacher_import.*orphan or ^mover_mover_copy
#   --every N      only every N-th cell of the copy jobs (default: all)
#   --jobs N       cells at a time (default: twice the processors; most of the time they wait)
#   --preset NAME  which build (default: release)
#   --help         this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

only='' every=1 preset=release jobs=$((2 * $(job_count)))
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --only | --every | --jobs | --preset)
      (($# > 1)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done

out=$root/build/matrix
# Tests that make the moves that no cell does, and which of them.
beside=(
  "lease_moves_test *"
  "lease_hello_test *"
  "lease_source_test *CannotBeLentAgain*"
  "multiproc_staging_proof_test *AlthoughTheConnectionWasLost"
  "multiproc_worker_staging_test *RefusesWhatIsOutOfRange*"
  "multiproc_mover_jobs_test *"
  "multiproc_mover_descriptors_test *"
)
mkdir -p "$root/build"
build_with_tests "$preset" lease_matrix job_matrix "${beside[@]%% *}" > "$root/build/matrix-build.log" ||
  die "the build failed; see build/matrix-build.log"
rm -rf "$out"
mkdir -p "$out"
cd "$root/build/$preset/tests/multiproc"
# cells PROGRAM STEP: the names of its tests that are asked for, every STEP-th of them.
cells() {
  "./$1" --gtest_list_tests | awk '/^[^ ]/ { suite = $1 } /^  / { print suite $1 }' |
    awk -F/ -v only="${only:-.}" '$NF ~ only' | awk -v step="$2" 'NR % step == 1 || step == 1' | paste -sd:
}

started=$SECONDS pids=() listed=0
for program in lease_matrix job_matrix; do
  step=1
  [[ $program == job_matrix ]] && step=$every
  filter=$(cells "$program" "$step")
  [[ -n $filter ]] || continue
  listed=$((listed + 1 + $(tr -cd : <<< "$filter" | wc -c)))
  echo "--gtest_filter=$filter" > "$out/$program.flags" # too long for a command line
  for ((shard = 0; shard < jobs; ++shard)); do
    GTEST_TOTAL_SHARDS=$jobs GTEST_SHARD_INDEX=$shard KVFERRY_MATRIX_REPORT=$out/$program.$shard.jsonl \
      KVFERRY_MOVES_REPORT=$out/$program.$shard.moves \
      "./$program" --gtest_flagfile="$out/$program.flags" > "$out/$program.$shard.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || true # the logs tell
  done
  pids=()
done
[[ -n $(find "$out" -name '*.log' -print -quit) ]] || die "no cell matches '$only'"

failed=0
# Of all cells so many of the handshake and of jobs count at the least: what does not apply is no test.
least='0 0'
[[ -n $only || $every -ne 1 ]] || least='880 1800'
python3 - "$out" $((SECONDS - started)) "$listed" "$least" << 'END' || failed=1
import collections
import glob
import json
import re
import sys

out, seconds, listed = sys.argv[1], sys.argv[2], int(sys.argv[3])
least = [int(number) for number in sys.argv[4].split()]
cells = [json.loads(line) for path in glob.glob(out + "/*.jsonl") for line in open(path)]
log = "".join(open(path, errors="replace").read() for path in sorted(glob.glob(out + "/*.log")))
passed = set(re.findall(r"\[       OK \] \S*/(\S+) \(", log))
reasons = collections.Counter(re.findall(r"Skipped\n(.+)\n", log))
skipped = set(re.findall(r"\[  SKIPPED \] \S*/(\S+) \(", log))
failures = sorted(set(re.findall(r"\[  FAILED  \] \S*/(\S+?), where", log)))
started = set(re.findall(r"\[ RUN      \] \S*/(\S+)", log))
unfinished = sorted(started - passed - skipped - set(failures))

blows = ["kill", "stop", "stop_for_good", "delay", "fail", "orphan"]
table = collections.defaultdict(list)
for cell in cells:
    point = (cell["victim"] + ": " if "victim" in cell else "") + cell["point"] + ("" if cell["occurrence"] == 1 else " #%d" % cell["occurrence"])
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
        outcomes = sorted({cell["outcome"].replace("_", " ") for cell in here})
        row.append("%d: %s, %d ms" % (len(here), " or ".join(outcomes), max(cell["ms"] for cell in here)))
    print("| %s | %s |" % (point, " | ".join(row)))
print()
print("| owns | struck | " + " | ".join(blow.replace("_", " ") for blow in blows) + " |")
print("|---" * (len(blows) + 2) + "|")
for owner in ("worker", "mover"):
    for struck, is_owner in (("owner", True), ("attacher", False)):
        other = "mover" if owner == "worker" else "worker"
        row = ["the " + owner, "the " + (owner if is_owner else other) + ", " + struck]
        for blow in blows:
            here = [cell for cell in cells if "victim" not in cell and cell["owner"] == owner
                    and cell["blow"] == blow and cell["at_owner"] == is_owner]
            outcomes = collections.Counter(cell["outcome"].replace("_", " ") for cell in here)
            slowest = max((cell["ms"] for cell in here), default=0)
            row.append(", ".join("%d %s" % (count, name) for name, count in outcomes.most_common())
                       + "; %d ms" % slowest if here else "–")
        print("| " + " | ".join(row) + " |")
print()
for reason, count in reasons.most_common():
    print("not applicable (%d cells): %s" % (count, reason))
# What was wrong in the first ones, then which: the end of the output is what is seen of a check that failed.
for name in (failures + unfinished)[:4]:
    begun = re.search(r"^\[ RUN      \] \S*/%s\n" % re.escape(name), log, re.MULTILINE)
    lines = log[begun.end():].split("\n[ RUN ", 1)[0].splitlines()
    print("--- %s, the end of what it said:" % name, *lines[-25:], sep="\n    ")
for name in failures + unfinished:
    print("FAILED", name)
print("%d cells counted, %d passed, %d failed, %d not applicable, %s s; logs in %s"
      % (len(cells), len(passed), len(failures) + len(unfinished), len(skipped), seconds, out))
missing = listed - len(passed) - len(skipped) - len(failures) - len(unfinished)
if missing:
    print("FAILED: %d cells never began; a shard ended early" % missing)
of_jobs = sum("victim" in cell for cell in cells)
few = len(cells) - of_jobs < least[0] or of_jobs < least[1]
if few:
    print("FAILED: %d cells of the handshake and %d of jobs, fewer than %d and %d"
          % (len(cells) - of_jobs, of_jobs, least[0], least[1]))
sys.exit(bool(failures or unfinished or missing or len(passed) != len(cells) or few))
END

# Every move of the relation is made by the code, or has a reason why it is not made here.
compare_moves() {
  local wrong=0 what reason
  sed -nE 's/^KVFERRY_MOVE\(([A-Za-z]+), ([A-Za-z]+), ([A-Za-z]+), ([A-Za-z]+)\).*/move \1 \2 \3 \4/p' \
    "$root/ipc/src/transitions/relation.inc" | LC_ALL=C sort > "$out/all"
  cat "$out"/*.moves | LC_ALL=C sort -u > "$out/taken"
  sed '/^#/d; /^$/d; s/ *|.*//' "$root/tests/matrix/moves.txt" | LC_ALL=C sort > "$out/listed"
  while read -r what; do
    echo "only the code makes: $what"
    wrong=1
  done < <(LC_ALL=C comm -13 "$out/all" "$out/taken")
  while read -r what; do
    echo "the code never makes: $what"
    wrong=1
  done < <(LC_ALL=C comm -23 "$out/all" "$out/taken" | LC_ALL=C comm -23 - "$out/listed")
  while read -r what; do
    echo "moves.txt: made, or no move: $what"
    wrong=1
  done < <(LC_ALL=C comm -23 "$out/all" "$out/taken" | LC_ALL=C comm -13 - "$out/listed")
  while IFS='|' read -r what reason; do
    if [[ -z ${reason// /} ]]; then
      echo "moves.txt: no reason: $what"
      wrong=1
    fi
  done < <(grep -vE '^(#|$)' "$root/tests/matrix/moves.txt")
  echo "$(grep -c . "$out/taken") of $(grep -c . "$out/all") moves made by the code, $(wc -l < "$out/listed") listed with a reason"
  return "$wrong"
}

if [[ -z $only ]]; then
  for test in "${beside[@]}"; do
    program=${test%% *}
    KVFERRY_MOVES_REPORT=$out/$program.moves "./$program" --gtest_filter="${test#* }" \
      > "$out/$program.log" 2>&1 || { echo "FAILED: $program; see $out/$program.log" && failed=1; }
  done
  compare_moves || failed=1
fi
exit "$failed"
