#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/check_layering.sh [TREE]
#
# Holds the sources of TREE (default: this checkout) to the rules that no compiler checks: who may
# include whom, no third-party types in public headers, calls that belong to one file, no sleeps,
# the licence header, the length of files. Prints FILE:LINE: RULE: TEXT for every breach.
#
# A line that must break a rule about calls says why, on it or in the comment line above it:
#   // lint-allow(RULE): reason
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

case ${1:-} in
  --help | -h) print_help && exit ;;
  -*) die "unknown option '$1'; see --help" ;;
  /*) cd "$1" ;;
  ?*) cd "$caller_directory/$1" ;;
esac

folders=()
for folder in kernels ipc cache_manager worker cli python tests; do
  [[ -d $folder ]] && folders+=("$folder")
done
((${#folders[@]})) || die "no source folder in $PWD"
mapfile -t files < <(source_files hpp cpp cuh cu -- "${folders[@]}")
((${#files[@]})) || die "no sources in $PWD"

awk '
  function report(rule, text) {
    printf "%s:%d: %s: %s\n", FILENAME, FNR, rule, text
    breaches++
  }
  function allowed(rule) {
    return index(above $0, "lint-allow(" rule "):")
  }
  function forbid(rule, pattern, home) {
    if (code ~ pattern && !(home != "" && FILENAME ~ home) && !allowed(rule)) report(rule, $0)
  }
  function finish() {
    if (last_line > 600) {
      printf "%s:%d: length: more than 600 lines\n", last_file, last_line
      breaches++
    }
  }
  BEGIN {
    may["kernels"] = "^kernels$"
    may["ipc"] = "^(ipc|kernels)$"
    may["cache_manager"] = "^(cache_manager|ipc|kernels)$"
    may["worker"] = "^(worker|ipc|kernels)$"
    may["cli"] = "^(cache_manager|worker|ipc|kernels)$"
    may["python"] = may["cli"]
    may["tests"] = may["cli"]
  }
  FNR == 1 {
    finish()
    folder = FILENAME
    sub(/\/.*/, "", folder)
    product = folder != "tests"
    public_header = FILENAME ~ /^[a-z_]+\/include\//
    above = ""
    if ($0 != "// SPDX-FileCopyrightText: The kvferry authors") report("licence", $0)
  }
  FNR == 2 && $0 != "// SPDX-License-Identifier: Apache-2.0" { report("licence", $0) }
  {
    last_file = FILENAME
    last_line = FNR
  }
  /^[ \t]*#[ \t]*include/ {
    target = $0
    sub(/^[^<"]*[<"]/, "", target)
    sub(/[>"].*/, "", target)
    if (target ~ /^kvferry\//) {
      split(target, part, "/")
      if (part[2] !~ may[folder]) report("layering", folder " must not include " target)
    }
    if (target ~ /(^|\/)\.\.\//) report("layering", "include by relative path: " target)
    if (product && target ~ /^(tests|support|gtest|gmock)\//)
      report("layering", "product code includes test code: " target)
    if (folder !~ /^(cli|tests)$/ && target ~ /^cli\//)
      report("layering", "nothing includes cli: " target)
    if (public_header &&
        target ~ /^(boost|spdlog|msgpack|nlohmann|sodium|toml\+\+|CLI)\/|^(zmq|msgpack|xxhash)[a-z_]*\.(h|hpp)$/)
      report("public-header", "third-party include in a public header: " target)
  }
  {
    code = $0
    gsub(/"([^"\\]|\\.)*"/, "\"\"", code)
    sub(/\/\/.*/, "", code)
    if ($0 ~ /(^|[^A-Za-z])(TODO|FIXME|XXX)([^A-Za-z]|$)/) report("unfinished", $0)
    if (/NOLINT/ && !/NOLINT(NEXTLINE|BEGIN|END)\([A-Za-z0-9.,-]+\)(: .|$)/)
      report("nolint", "write NOLINTNEXTLINE(check): reason")
    forbid("sleep", "(^|[^a-z_])(sleep_for|sleep_until|usleep|nanosleep|sleep)[ ]*\\(")
    if (folder !~ /^tests$/ || FILENAME ~ /\.hpp$/)
      if (code !~ /literals;/) forbid("using-namespace", "using[ ]+namespace[ ]")
    if (product) {
      forbid("cuda-memory", "(^|[^A-Za-z_])cuda(Malloc|Free|HostAlloc)[A-Za-z]*[ ]*\\(", "^ipc/src/device/cuda")
      forbid("shm", "(^|[^A-Za-z_])shm_(open|unlink)[ ]*\\(", "^ipc/src/os/shared_memory\\.cpp$")
      forbid("getenv", "(^|[^A-Za-z_])(secure_)?getenv[ ]*\\(", "^ipc/src/os/process\\.cpp$")
      forbid("stdout", "std::(cout|cerr)|(^|[^A-Za-z_])printf[ ]*\\(|std::printf|fmt::print[ ]*\\(")
      # Straight into a smart pointer is fine: make_unique cannot reach private constructors.
      gsub(/_ptr(<[^;(]*>)? *[a-z_]*[({]new /, "", code)
      forbid("new", "(^|[^A-Za-z_.])new[ ]+[A-Za-z_:]|(^|[^A-Za-z_.])new[ ]*\\(")
      forbid("fork", "(^|[^A-Za-z_])v?fork[ ]*\\(")
      forbid("assert", "(^|[^A-Za-z_])assert[ ]*\\(")
    }
    above = $0 ~ /^[ \t]*\/\// ? $0 : ""
  }
  END {
    finish()
    exit breaches > 0
  }
' "${files[@]}"
