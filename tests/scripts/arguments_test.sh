#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# A script that is called wrongly says so before it installs or builds anything.
set -euo pipefail
source_root=$1
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r "$source_root/scripts" "$tree/scripts"
mkdir -p "$tree/cli/src" "$tree/bin" "$tree/tests/fuzz"
cp "$source_root"/cli/src/*.cpp "$tree/cli/src"
cp "$source_root"/tests/fuzz/*.cpp "$tree/tests/fuzz"
# Whatever begins to work leaves a trace.
for tool in apt-get cmake ctest sudo; do
  printf '#!/bin/sh\ntouch "%s/worked"\nexit 1\n' "$tree" > "$tree/bin/$tool"
  chmod +x "$tree/bin/$tool"
done
export PATH=$tree/bin:$PATH

for script in test check tidy format setup quickstart check_layering fuzz waits strace_check bounds matrix model relation; do
  if message=$("$tree/scripts/$script.sh" --bogus 2>&1); then
    echo "$script.sh took --bogus"
    exit 1
  fi
  if [[ $message != *"unknown "*"'--bogus'"* ]]; then
    echo "$script.sh --bogus said: $message"
    exit 1
  fi
  if [[ -e $tree/worked ]]; then
    echo "$script.sh began to work although it was called wrongly"
    exit 1
  fi
done
