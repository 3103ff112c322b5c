#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/format.sh [--check]
#
# Formats the C++ and CUDA sources in place with clang-format 14.
#   --check   change nothing; fail when a file is not formatted
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

mode=(-i)
case ${1:-} in
  '') ;;
  --check) mode=(--dry-run -Werror --ferror-limit=3) ;;
  --help | -h) print_help && exit ;;
  *) die "unknown option '$1'; see --help" ;;
esac

clang_format=$(find_tool clang-format-14 clang-format)
source_files hpp cpp cuh cu | xargs -d '\n' "$clang_format" "${mode[@]}"
