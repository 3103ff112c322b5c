#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/tidy.sh [FILE...]
#
# Runs clang-tidy 14 over these sources, or over every .cpp of the libraries and the command, with
# the compile commands of build/dev (configured when they are missing).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  --help | -h) print_help && exit ;;
  -*) die "unknown option '$1'; see --help" ;;
esac

run_clang_tidy=$(find_tool run-clang-tidy-14 run-clang-tidy)
clang_tidy=$(find_tool clang-tidy-14 clang-tidy)
[[ -f build/dev/compile_commands.json ]] || cmake --preset dev > /dev/null

files=()
if (($#)); then
  for file in "$@"; do
    [[ -f $caller_directory/$file ]] && file=$caller_directory/$file
    files+=("$(realpath -e "$file")")
  done
else
  mapfile -t files < <(source_files cpp -- kernels ipc cache_manager worker cli | sed "s:^:$root/:")
fi
# run-clang-tidy takes regular expressions and is silent about a file that no target compiles. With
# and without a CUDA toolkit, the other half of the device backends is such a file.
compiled=()
for file in "${files[@]}"; do
  if grep -qF "\"$file\"" build/dev/compile_commands.json; then
    compiled+=("$file")
  elif [[ $file != */ipc/src/device/*cuda_* ]]; then
    die "no target of build/dev compiles $file; add it to a CMakeLists.txt or configure again"
  fi
done
files=("${compiled[@]}")
mapfile -t patterns < <(printf '%s\n' "${files[@]}" | sed 's:[.+]:\\&:g; s:^:^:; s:$:$:')
"$run_clang_tidy" -quiet -p build/dev -j "$(job_count)" -clang-tidy-binary "$clang_tidy" \
  "${patterns[@]}" 2>&1 |
  sed -E 's/\x1b\[[0-9;]*m//g; /^[0-9]+ warnings? generated|^clang-tidy|^$/d'
