#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Slopes must be those over the iterations' numbers, and a run without a report must have a line.
set -euo pipefail
table=$1/scripts/rl_table.py
reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

# Ten MiB more in every iteration; of the twelve, every third failed.
python3 - "$reports/grows.json" << 'PY'
import json, sys
times = ("pause", "update", "clear", "reinit", "release", "resume", "continue")
iterations = []
for number in range(1, 13):
    one = {"iteration": number, "done": number % 3 != 0, "seconds": 1, "reserved_before": 1 << 20, "used_after": 1 << 20,
           "reserved_after": 10 * number << 20, "free_on_device_least": (1000 - 10 * number) << 20}
    one.update({time + "_ms": 1.5 for time in times})
    iterations.append(one)
report = {"iterations": iterations, "failures": [], "corrupt": 0, "verified": 7, "leaked_device_bytes": 0,
          "graphs": [{"recordings": 1, "launches": 9}]}
json.dump(report, open(sys.argv[1], "w"))
PY
echo '{' > "$reports/cut.json"

failures=0
expect() { # pattern, output
  if ! grep -qE "$1" <<< "$2"; then
    printf 'wanted: %s\ngot: %s\n' "$1" "$2"
    failures=$((failures + 1))
  fi
}
output=$(python3 "$table" "$reports" grows gone cut)
# From the fourth iteration on.
expect '^grows +12 +0 +0/7 +0 +1 +40-110 +1 +10485760 +890-960 +-10485760 ' "$output"
expect '^gone +no report$' "$output"
expect '^cut +no report$' "$output"
expect '^gone: no report: .*No such file' "$output"
output=$(python3 "$table" "$reports")
expect '^cut +no report$' "$output"
expect '^grows +12 ' "$output"
((failures == 0))
