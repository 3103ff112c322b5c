#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# host_tier.py must find that all holds of the built command, and fail, saying why, with one that
# tells something else than it found.
set -euo pipefail
scripts=$1/scripts
program=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

python3 "$scripts/made_traces.py" 5 "$folder/traces"
# One request in 2.5 ms, so that the processes die while there is still something to do.
trace=$folder/traces/chats.jsonl
deaths=(--only deaths --gpu-blocks 200 --kill-after 600 --death-options "--requests 3200 --speed 0.4")

# The command, and what it tells changed: STAND_IN is a Python expression that changes `told`, the
# JSON that the command STAND_IN_FOR tells, on stdout or in its report.
cat > "$folder/stand_in" << 'PY'
#!/usr/bin/env python3
import json, os, subprocess, sys

arguments = sys.argv[1:]
if arguments[0] != os.environ["STAND_IN_FOR"]:
    os.execv(os.environ["PROGRAM"], [os.environ["PROGRAM"], *arguments])
done = subprocess.run([os.environ["PROGRAM"], *arguments], stdout=subprocess.PIPE, text=True)
report = arguments[arguments.index("--report") + 1] if "--report" in arguments else None
told = json.load(open(report)) if report else json.loads(done.stdout)
exec(os.environ["STAND_IN"], {"told": told})
if report:
    json.dump(told, open(report, "w"))
else:
    json.dump(told, sys.stdout)
sys.exit(done.returncode)
PY
chmod +x "$folder/stand_in"
export PROGRAM=$program STAND_IN_FOR='' STAND_IN=''

# judge PROGRAM OPTION...: its exit code and output.
judge() {
  code=0
  output=$(python3 "$scripts/host_tier.py" --program "$1" --trace "$trace" --blocks 608 --gpu-blocks 100 \
    --requests 400 --out "$folder/out" "${@:2}" 2>&1) || code=$?
}
wrong() {
  printf '%s\nexit code %d: %s\n' "$1" "$code" "$output"
  failures=$((failures + 1))
}
# holds PATTERN PROGRAM OPTION...
holds() {
  judge "${@:2}"
  if ((code != 0)) || ! grep -qE "$1" <<< "$output" || ! grep -q 'all of it holds' <<< "$output"; then
    wrong "wanted: $1, and that all holds"
  fi
}
# fails PATTERN PROGRAM OPTION...
fails() {
  judge "${@:2}"
  if ((code != 1)) || ! grep -qE "FAILED: $1" <<< "$output" || ! grep -q '^1 parts failed' <<< "$output"; then
    wrong "wanted: FAILED: $1"
  fi
}
# lies COMMAND CHANGE PATTERN OPTION...: the stand-in changes what the command tells.
lies() {
  STAND_IN_FOR=$1 STAND_IN=$2 fails "$3" "$folder/stand_in" "${@:4}"
}

holds 'data +lru +host memory for 608 blocks: (0\.[0-9]+) with data, [1-9][0-9]* blocks compared, 0 corrupt; \1 simulated' \
  "$program" --only simulate,data
for wanted in 'capacity +reuse +lru +arc +s3fifo +sieve +lfu +optimal' 'simulate +[0-9]+  0\.' 'data +reuse '; do
  grep -qE "$wanted" <<< "$output" || wrong "wanted: $wanted"
done
for file in simulate.json simulate.svg data-reuse.json data-lru.json; do
  [[ -s $folder/out/$file ]] || wrong "no $file"
done

# What the command finds, but for one figure.
lies simulate 'told["results"][3]["hit_rate"] = told["unlimited_hit_rate"] + 0.01' \
  'reuse finds 0\.[0-9]+ with [0-9]+ blocks, more than the' --only simulate
data=(--only data --policies lru)
change='told["results"][0]["hit_rate"] += 0.0015'
lies simulate "$change" 'lru finds 0\.[0-9]+ with data and 0\.[0-9]+ simulated: more than 0\.001' "${data[@]}"
STAND_IN_FOR=simulate STAND_IN=${change/15/05} holds 'data +lru' "$folder/stand_in" "${data[@]}"
for field in blocks_corrupt leaked_device_bytes leaked_host_bytes leftover_names; do
  lies replay "told['$field'] = 3" "data-lru: $field is 3, not 0; see .*/data-lru\.json" "${data[@]}"
done
printf '#!/bin/sh\necho "no such luck" >&2\nexit 7\n' > "$folder/broken"
chmod +x "$folder/broken"
fails 'kvferry replay .*: exit code 7: no such luck' "$folder/broken" "${data[@]}"

holds "deaths +after the mover's +[1-9][0-9]* requests, 0\.[0-9]+ found, 0\.[0-9]+ in host memory" \
  "$program" "${deaths[@]}"
grep -qE 'the next manager adopted [1-9][0-9]* of [1-9][0-9]* blocks' <<< "$output" || wrong "nothing adopted"
lies replay 'told["deaths"][1]["after"]["hits_host"] = 0' \
  "deaths: nothing was found in host memory after the mover's" "${deaths[@]}"
fails 'deaths: the replay ended before its processes were killed: give it more requests' \
  "$program" --only deaths --death-options '--requests 300'
fails 'replay with deaths: exit code 1 before its processes were killed; see .*/deaths\.log' \
  "$program" --only deaths --gpu-blocks 8
exit "$((failures > 0))"
