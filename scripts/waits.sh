#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/waits.sh [--deadlines | --values] [--markdown] [TREE]
#
# Lists every place in the product's sources (of TREE, default: this checkout) that can wait: which
# call, for what, how long at most, and what ends it earlier, such as the death of whom it waits for.
# Fails when a call that can wait says none of that, or has no limit. Each says it in the comment
# above the call:
#
#   // wait: WHAT; LIMIT; WHAT ENDS IT EARLIER
#       A wait with a time limit. LIMIT begins with the name that the call is given: a constant, an
#       option, or a deadline of the caller. A call without a time limit cannot be one of these.
#   // wait-idle: WHAT; WHAT ENDS IT; thread NAME
#       Nothing is owed to anybody meanwhile, so it may take for ever. On this thread alone.
#   // wait-brief: WHAT; WHY IT ENDS
#       Without a time limit, because what it waits for waits for nothing itself.
#   // wait-driver: WHAT; WHY IT ENDS
#       A call into the GPU's driver that may wait for the device.
#   // wait-none: WHY
#       Looks like a wait and is none.
#
# scripts/strace_check.sh holds running processes to it.
#
#   --deadlines     every deadline that is set, and every timer, with its value, instead
#   --values        every constant of the sources with its value, instead
#   --markdown      the table for documents
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options=()
tree=$root
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --deadlines | --values | --markdown | --idle-threads) options+=("$1") ;;
    -*) die "unknown option '$1'; see --help" ;;
    /*) tree=$1 ;;
    *) tree=$caller_directory/$1 ;;
  esac
  shift
done
command -v python3 > /dev/null || die "python3 is not installed; run scripts/setup.sh"
exec python3 "$root/scripts/waits.py" "${options[@]}" "$tree"
