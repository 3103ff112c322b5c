# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts: sets `root` and `caller_directory`, and works from `root`.

set -euo pipefail
unset CDPATH
# shellcheck disable=SC2034 # used by the scripts that take file names
caller_directory=$PWD
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

# Without it ccache keeps nothing that was compiled with precompiled headers.
export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}

die() {
  echo "${0##*/}: $*" >&2
  exit 1
}

# The comment block at the top of a script is its help text.
print_help() {
  awk 'NR > 3 { if (!/^#/ || /^# shellcheck/) exit; sub(/^# ?/, ""); print }' "$0"
}

# Newest name first that is installed: find_tool clang-format-14 clang-format
find_tool() {
  local name
  for name in "$@"; do
    if command -v "$name" > /dev/null; then
      echo "$name"
      return
    fi
  done
  die "none of $* is installed; run scripts/setup.sh"
}

job_count() {
  nproc 2> /dev/null || echo 2
}

# Tests at a time: most of the time they wait for each other's processes.
test_job_count() {
  echo $((2 * $(job_count)))
}

has_gpu() {
  command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q '^GPU '
}

# C++ sources of the project: source_files hpp cpp, optionally limited to folders after --.
source_files() {
  local -a names=() folders=()
  while (($#)) && [[ $1 != -- ]]; do
    names+=(-o -name "*.$1")
    shift
  done
  (($#)) && shift
  folders=("$@")
  if ((${#folders[@]} == 0)); then
    folders=(kernels ipc cache_manager worker cli tests)
  fi
  find "${folders[@]}" -type f \( "${names[@]:1}" \) | LC_ALL=C sort
}

# Builds targets of a preset, or all of it, with the tests and the faults that they plan. Everything that
# runs tests builds like this: they share what is built.
build_with_tests() { # preset, targets...
  local preset=$1
  shift
  cmake --preset "$preset" -DKVFERRY_BUILD_TESTS=ON -DKVFERRY_FAULT_POINTS=ON &&
    cmake --build --preset "$preset" --parallel "$(job_count)" ${1:+--target "$@"}
}

# "N passed, N failed, N skipped" from a JUnit file of ctest. A test whose program is missing is
# reported by ctest as not run; here it is a failure.
summarize_junit() {
  awk '
    /^\t<testcase / {
      status = $0
      sub(/.* status="/, "", status)
      sub(/".*/, "", status)
      if (status == "run") passed++
      else if (status == "disabled") skipped++
      else if (status == "notrun") pending = 1
      else failed++
    }
    pending && /^\t\t<skipped / {
      if (/message="SKIP_/) skipped++
      else failed++
      pending = 0
    }
    END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }
  ' "$1"
}
