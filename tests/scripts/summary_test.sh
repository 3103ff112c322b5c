#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# The closing line of scripts/test.sh must count what a real ctest run reports.
set -euo pipefail
source_root=$1
project=$(mktemp -d)
trap 'rm -rf "$project"' EXIT

cat > "$project/CMakeLists.txt" << 'END'
cmake_minimum_required(VERSION 3.25)
project(summary NONE)
enable_testing()
foreach(name a b c)
  add_test(NAME passes.${name} COMMAND ${CMAKE_COMMAND} -E true)
endforeach()
add_test(NAME fails COMMAND ${CMAKE_COMMAND} -E false)
add_test(NAME has_no_program COMMAND /nonexistent/program)
add_test(NAME skips COMMAND ${CMAKE_COMMAND} -E echo "[  SKIPPED ] status=\"fail\"")
set_tests_properties(skips PROPERTIES SKIP_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
add_test(NAME disabled COMMAND ${CMAKE_COMMAND} -E true)
set_tests_properties(disabled PROPERTIES DISABLED ON)
END
cmake -G Ninja -S "$project" -B "$project/build" > /dev/null
ctest --test-dir "$project/build" --output-junit "$project/junit.xml" > /dev/null 2>&1 && exit 1

# shellcheck source=../../scripts/common.sh
source "$source_root/scripts/common.sh"
summary=$(summarize_junit "$project/junit.xml")
if [[ $summary != "3 passed, 2 failed, 2 skipped" ]]; then
  echo "wanted '3 passed, 2 failed, 2 skipped', got '$summary'"
  exit 1
fi
