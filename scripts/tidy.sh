#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/tidy.sh [FILE...]
#
# Runs clang-tidy 14 over these sources, with the compile commands of build/dev, or over every .cpp
# of the libraries and the command, in batches (build/tidy; both are configured when they are
# missing). In a batch each header is read once, which takes a fifth of the time.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  --help | -h) print_help && exit ;;
  -*) die "unknown option '$1'; see --help" ;;
esac

run_clang_tidy=$(find_tool run-clang-tidy-14 run-clang-tidy)
clang_tidy=$(find_tool clang-tidy-14 clang-tidy)

# run-clang-tidy takes regular expressions, and is silent about a file that no target compiles.
tidy() { # build directory, options..., --, files...
  local commands=$1 options=()
  shift
  while [[ $1 != -- ]]; do options+=("$1") && shift; done
  shift
  mapfile -t patterns < <(printf '%s\n' "$@" | sed 's:[.+]:\\&:g; s:^:^:; s:$:$:')
  "$run_clang_tidy" -quiet -p "$commands" -j "$(job_count)" -clang-tidy-binary "$clang_tidy" \
    "${options[@]}" "${patterns[@]}" 2>&1 |
    sed -E 's/\x1b\[[0-9;]*m//g; /^[0-9]+ warnings? generated|^clang-tidy|^$/d'
}

# With and without a CUDA toolkit, the other half of the device backends is in no target.
expect_other_half() {
  [[ $1 == */ipc/src/device/*cuda_* ]] ||
    die "no target of $2 compiles $1; add it to a CMakeLists.txt or configure again"
}

if (($#)); then
  [[ -f build/dev/compile_commands.json ]] || cmake --preset dev > /dev/null
  files=()
  for file in "$@"; do
    [[ -f $caller_directory/$file ]] && file=$caller_directory/$file
    file=$(realpath -e "$file")
    if grep -qF "\"$file\"" build/dev/compile_commands.json; then
      files+=("$file")
    else
      expect_other_half "$file" build/dev
    fi
  done
  ((${#files[@]} == 0)) || tidy build/dev -- "${files[@]}"
  exit
fi

# Always anew: batches of sources that are gone would stay.
rm -rf build/tidy
cmake --preset dev -B build/tidy --no-warn-unused-cli -DKVFERRY_UNITY=ON -DKVFERRY_UNITY_BATCH=24 \
  -DKVFERRY_BUILD_TESTS=OFF > /dev/null
mapfile -t files < <(source_files cpp -- kernels ipc cache_manager worker cli | sed "s:^:$root/:")
mapfile -t batches < <(sed -nE 's/^ *"file": "(.*)",?$/\1/p' build/tidy/compile_commands.json |
  grep -E '\.cpp$|/Unity/unity_[0-9]+_cxx\.cxx$' | sort -u)  # not what verifies header sets
for file in "${files[@]}"; do
  printf '%s\n' "${batches[@]}" | grep -qxF "$file" ||
    grep -rqF --include='*.cxx' "\"$file\"" build/tidy || expect_other_half "$file" build/tidy
done
# Findings in sources are those of an included file there, and to include a source is the point.
code=0
headers='/(kernels|ipc|cache_manager|worker|cli)/(include/|src/)?[a-z0-9_/]*\.(hpp|cpp)$'
tidy build/tidy -header-filter "$headers" -extra-arg=-Wno-unused-command-line-argument \
  -checks=-bugprone-suspicious-include -- "${batches[@]}" || code=$?
# The one check that looks at a main file only.
mapfile -t aliases < <(grep -lE '^ *namespace [a-z_]+ = ' "${files[@]}")
if ((${#aliases[@]})); then
  [[ -f build/dev/compile_commands.json ]] || cmake --preset dev > /dev/null
  tidy build/dev "-checks=-*,misc-unused-alias-decls" -- "${aliases[@]}" || code=$?
fi
exit "$code"
