#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/quickstart.sh [options of kvferry replay]
#
# From a fresh checkout to a running offload: installs what is missing, builds the release preset and
# replays a trace of requests through a manager, movers and workers on this machine, with a GPU or
# without. All options go to `kvferry replay`; see build/release/cli/kvferry replay --help.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  print_help
  exit
fi
# A slip in a name is told now, not after minutes of building; values are kvferry's to judge.
for argument in "$@"; do
  case $argument in
    --*)
      name=${argument%%=*}
      grep -rqF --include="*.cpp" -- "\"$name\"" cli/src || die "unknown option '$name'; see --help"
      ;;
  esac
done

scripts/setup.sh --build
log=build/quickstart.log
mkdir -p build
echo "quickstart: building (log: $root/$log)"
{ cmake --preset release -DKVFERRY_BUILD_TESTS=OFF &&
  cmake --build --preset release --parallel "$(job_count)"; } > "$log" 2>&1 || {
  tail -n 40 "$log" >&2
  die "the build failed"
}
# Relative file names in the options mean the caller's directory.
cd "$caller_directory" || die "cannot enter $caller_directory"
exec "$root/build/release/cli/kvferry" replay "$@"
