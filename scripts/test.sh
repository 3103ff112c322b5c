#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/test.sh [-- options of ctest]
#
# Installs what is missing, builds the release preset and runs every test that this machine can run:
# all but those labelled gpu, and those, too, when there is a GPU. The last line is
# "N passed, N failed, N skipped"; the exit code is not zero when a test failed. What comes after --
# goes to ctest: scripts/test.sh -- -R ReplayTest --output-on-failure
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  '') ;;
  --) shift ;;
  --help | -h) print_help && exit ;;
  *) die "unknown argument '$1'; options of ctest go after --; see --help" ;;
esac

scripts/setup.sh --test
log=build/test-build.log
mkdir -p build
echo "test: building the release preset (log: $root/$log)"
build_with_tests release > "$log" 2>&1 || {
  tail -n 60 "$log" >&2
  die "the build failed"
}

selection=()
if has_gpu; then
  export KVFERRY_REQUIRE_GPU=1
else
  echo "test: no GPU here; tests labelled gpu are left out"
  selection=(-LE gpu)
fi

junit=$root/build/release/junit.xml
rm -f "$junit"
code=0
ctest --preset release "${selection[@]}" --parallel "$(test_job_count)" --timeout 120 \
  --output-junit "$junit" "$@" || code=$?
[[ -s $junit ]] || die "ctest wrote no report (exit code $code)"
summary=$(summarize_junit "$junit")
echo "$summary"
[[ $code -eq 0 && $summary == *", 0 failed, "* && $summary != "0 passed, "* ]]
