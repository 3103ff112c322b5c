#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check.sh [--only STAGE]... [--skip STAGE]... [--list]
#
# All checks of the repository, in the order people and CI run them, one line per stage; the log of a
# failing stage is shown and kept under build/check/. The exit code is the number of failed stages.
#
#   format    sources are formatted               shell     scripts pass shellcheck
#   layering  includes and calls keep the rules   build     the release preset builds without warnings
#   labels    every test has a known label        headers   every public header compiles alone
#   tests     scripts/test.sh                     tidy      clang-tidy over the product's sources
#   model     scripts/model.sh: the protocols, model-checked, and their mutants
#   waits     scripts/waits.sh: no call that can wait without a limit, or without saying so
#   strace    scripts/strace_check.sh: none in running processes either
#   relation  scripts/relation.sh: the model, its relation and the checker of the code, held to each other
#   batches   scripts/batches.sh: sources do not get into each other's way when compiled together
#   matrix    scripts/matrix.sh: every fault at every transition of the handshake and of copy jobs; and
#             the code makes every move of the relation
#   mutants   scripts/mutants.sh: mistakes built into the code, each caught by its own rule
#   soak      scripts/soak.sh, briefly: clears under traffic and kills, both owners
#   ratios    scripts/ratios.sh: no way of copying got much slower, against memcpy on simulated devices
#   asan      suites under address and undefined-behaviour sanitizers
#   tsan      suites under the thread sanitizer
#   fuzz      every fuzz target for a moment, 30 s together
#   install   install, then a project of its own that does find_package(kvferry)
# shellcheck disable=SC2317 # stages are called by name
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

stages=(format shell layering waits batches model build labels headers relation tests strace matrix mutants soak ratios tidy
  asan tsan fuzz install)

stage_format() {
  scripts/format.sh --check
}

stage_shell() {
  shellcheck scripts/*.sh tests/scripts/*.sh .ci/run
}

stage_layering() {
  scripts/check_layering.sh
}

stage_waits() {
  scripts/waits.sh
}

stage_batches() {
  scripts/batches.sh
}

stage_strace() {
  if ! strace -o /dev/null true; then
    echo "left out: strace may not trace here; a container needs the capability SYS_PTRACE"
    return
  fi
  scripts/strace_check.sh
}

stage_model() {
  scripts/model.sh
}

stage_build() {
  build_with_tests release
}

stage_relation() {
  scripts/relation.sh
}

stage_matrix() {
  scripts/matrix.sh --jobs 8
}

stage_mutants() {
  scripts/mutants.sh
}

stage_ratios() {
  build_with_tests release
  scripts/ratios.sh
}

stage_soak() {
  scripts/soak.sh --cycles 200 &&
    scripts/soak.sh --cycles 200 -- --odd eintr,clock,old-kernel --forks 0.2
}

# A test without a label is run by nobody: ctest --print-labels would not tell.
stage_labels() {
  build_with_tests release
  ctest --test-dir build/release --show-only=json-v1 > build/check/tests.json
  python3 - build/check/tests.json << 'END'
import json
import sys

KNOWN = {"pure", "unit", "multiproc", "gpu", "cli"}
tests = json.load(open(sys.argv[1], encoding="utf-8"))["tests"]
wrong = 0
names = set()
for test in tests:
    if test["name"] in names:
        print(f"{test['name']}: two tests have this name")
        wrong += 1
    names.add(test["name"])
    properties = {p["name"]: p["value"] for p in test.get("properties", [])}
    labels = properties.get("LABELS", [])
    if len(labels) != 1 or labels[0] not in KNOWN:
        print(f"{test['name']}: labels {labels}, expected one of {sorted(KNOWN)}")
        wrong += 1
    if "TIMEOUT" not in properties:
        print(f"{test['name']}: no TIMEOUT")
        wrong += 1
print(f"{len(tests)} tests, {wrong} wrong")
sys.exit(1 if wrong or not tests else 0)
END
}

stage_headers() {
  build_with_tests release all_verify_interface_header_sets
}

stage_tests() {
  scripts/test.sh
}

stage_tidy() {
  scripts/tidy.sh
}

# Only what did not pass goes to the log, so that its end shows it.
without_passed() {
  grep -vE '^ +Start +[0-9]+:| Passed +[0-9.]+ sec$' || true
}

# The thread sanitizer of gcc 12 refuses the address layout of kernels with many random bits.
run_sanitized() {
  if command -v setarch > /dev/null && setarch "$(uname -m)" -R true 2> /dev/null; then
    setarch "$(uname -m)" -R "$@"
  else
    "$@"
  fi
}

# Not for them: tests that leave a process without descriptors (the sanitizers open pipes to look at
# memory, and report what they cannot look at), memory's growth (they keep what is freed), what is
# preloaded (they have to come first), files without a size (their reports), threads of a forked
# child (not supported by the one for threads), what is measured over gigabytes of copies, and who
# counts allocations by operators of its own (theirs are replaced).
not_sanitized='^ScriptsTest|WithoutDescriptors|^(Mover|Lender)DescriptorsTest|SoakTest\.AFewCycles'
not_sanitized+='|SoakLeakTest.*/memory|Odd(Replay|Soak)Test|ALimitOnTheSizeOfFiles|ForkedChildTest\.ConnectsA'
not_sanitized+='|^SharedLinkTest|PlanAllocationsTest'
readonly not_sanitized

# Reports go to files, since many processes end by a test's SIGKILL or with an exit code that no test
# looks at.
sanitized_suites() { # preset, labels, tests that are left out beside not_sanitized
  local preset=$1 labels=$2 left_out=$not_sanitized${3:+|$3} reports=$root/build/check/$1-reports code=0
  cmake --preset "$preset"
  # Building runs the test programs to list their cases, hence under the same layout.
  run_sanitized cmake --build --preset "$preset" --parallel "$(job_count)"
  rm -rf "$reports"
  mkdir -p "$reports"
  export ASAN_OPTIONS=$ASAN_OPTIONS:log_path=$reports/report
  export TSAN_OPTIONS=$TSAN_OPTIONS:log_path=$reports/report
  run_sanitized ctest --preset "$preset" -L "^($labels)\$" -E "$left_out" \
    --parallel "$(test_job_count)" | without_passed || code=$?
  # A line in there may also be about a thread that ended while the leak checker looked at it.
  if grep -qE '^SUMMARY|ERROR: |WARNING: ThreadSanitizer|runtime error' "$reports"/report.* 2> /dev/null; then
    cat "$reports"/report.*
    echo "reports under $reports:"
    grep -h '^SUMMARY' "$reports"/report.* | sort | uniq -c
    code=1
  fi
  return "$code"
}

# Not for the slow one of the two either: whole runs that wait for most of their time, of processes
# that the shorter ones have too.
long_runs='BenchTest\.(AnAblation|ComparesA|MeasuresEvery|MeasuresInterference|MeasuresThe|MeasuresWhat|BlockFirst|ShowsA)|ReplayPauseTest\.FlushUnder'
long_runs+='|ReplayFaultTest\.(ASecondMover|AClearThatFails)|^Victims/ReplayDeathTest'
long_runs+='|ReplayUnitGroupsTest.*/tiny(_draft|_state)?$|SimulationTest\.OursGoes'
readonly long_runs

stage_asan() {
  export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 TSAN_OPTIONS=
  export UBSAN_OPTIONS=print_stacktrace=1
  sanitized_suites asan 'pure|unit|multiproc|cli' "$long_runs"
}

stage_tsan() {
  export TSAN_OPTIONS="suppressions=$root/tests/tsan.supp:second_deadlock_stack=1" ASAN_OPTIONS=
  # The command's suites are other processes of the same code, five to fifteen times slower here; pure
  # tests have one thread.
  sanitized_suites tsan 'unit|multiproc'
}

stage_fuzz() {
  scripts/fuzz.sh --seconds 30
}

stage_install() {
  local prefix=$root/build/check/prefix consumer=$root/build/check/consumer
  rm -rf "$prefix" "$consumer"
  cmake --preset release
  cmake --build --preset release --parallel "$(job_count)"
  cmake --install build/release --prefix "$prefix"
  # The consumer must find what was installed, never this tree.
  cmake -S tests/package -B "$consumer" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF
  cmake --build "$consumer"
  "$consumer/kvferry_consumer"
  "$prefix/bin/kvferry" --version
}

selected=()
skipped=()
while (($#)); do
  case $1 in
    --only | --skip)
      (($# > 1)) || die "$1 needs the name of a stage"
      [[ " ${stages[*]} " == *" $2 "* ]] || die "no stage '$2'; stages: ${stages[*]}"
      if [[ $1 == --only ]]; then selected+=("$2"); else skipped+=("$2"); fi
      shift 2
      ;;
    --list) printf '%s\n' "${stages[@]}" && exit ;;
    --help | -h) print_help && exit ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done
((${#selected[@]})) || selected=("${stages[@]}")

scripts/setup.sh
mkdir -p build/check
failed=()
for stage in "${stages[@]}"; do
  [[ " ${selected[*]} " == *" $stage "* && " ${skipped[*]} " != *" $stage "* ]] || continue
  log=build/check/$stage.log
  started=$SECONDS
  # A process of its own: errexit does not work inside an if, and exports must not leak.
  set +e
  (set -e; "stage_$stage") > "$log" 2>&1
  code=$?
  set -e
  if ((code == 0)); then
    printf 'ok     %-9s %4d s\n' "$stage" "$((SECONDS - started))"
  else
    printf 'FAILED %-9s %4d s, exit code %d; the end of %s:\n' \
      "$stage" "$((SECONDS - started))" "$code" "$log"
    tail -n 60 "$log" | sed 's/^/    /'
    failed+=("$stage")
  fi
done
((${#failed[@]} == 0)) || echo "failed: ${failed[*]}"
exit "${#failed[@]}"
