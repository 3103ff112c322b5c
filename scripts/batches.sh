#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/batches.sh
#
# Reads every target's sources as one file, with all warnings: no name of one may stand in another's
# way. So whoever compiles them in batches may cut these anywhere, and a new source moves no file into
# trouble.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

cmake --preset release -B build/batches --no-warn-unused-cli -DKVFERRY_UNITY=ON -DKVFERRY_UNITY_BATCH=0 \
  -DKVFERRY_FAULT_POINTS=ON > /dev/null
python3 - "$(job_count)" << 'END'
import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys

commands = [c for c in json.load(open("build/batches/compile_commands.json", encoding="utf-8"))
            if re.search(r"/Unity/unity_\d+_cxx\.cxx$", c["file"])]


def errors_of(command):
    words = [w for w in shlex.split(command["command"]) if os.path.basename(w) != "ccache"]
    output = words.index("-o")
    del words[output:output + 2]
    words += ["-fsyntax-only"]
    done = subprocess.run(words, cwd=command["directory"], capture_output=True, text=True, check=False)
    errors = re.findall(r".*error: .*", done.stderr)
    return errors if done.returncode == 0 or errors else [done.stderr]


with concurrent.futures.ThreadPoolExecutor(int(sys.argv[1])) as pool:
    errors = [e for found in pool.map(errors_of, commands) for e in found]
print("\n".join(errors), end="\n" if errors else "")
print(f"{len(commands)} targets, {len(errors)} errors")
sys.exit(1 if errors or not commands else 0)
END
