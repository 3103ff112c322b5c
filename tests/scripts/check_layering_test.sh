#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# check_layering.sh must find each planted breach, under the name of its rule, and nothing else.
set -euo pipefail
check=$1/scripts/check_layering.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
failures=0

header='// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0'

# write FILE LINE...
write() {
  local file=$tree/$1
  shift
  mkdir -p "$(dirname "$file")"
  { echo "$header" && printf '%s\n' "$@"; } > "$file"
}

# expect RULE FILE LINE...: the breach in FILE is reported as RULE.
expect() {
  local rule=$1 file=$2 output
  shift 2
  write "$file" "$@"
  if output=$("$check" "$tree") || [[ $output != "$file:"*": $rule: "* ]]; then
    echo "planted in $file: $*; wanted rule '$rule', got: ${output:-nothing}"
    failures=$((failures + 1))
  fi
  rm "$tree/$file"
}

# accept FILE LINE...: no breach.
accept() {
  local file=$1 output
  shift
  write "$file" "$@"
  if ! output=$("$check" "$tree"); then
    echo "allowed in $file: $*; got: $output"
    failures=$((failures + 1))
  fi
  rm "$tree/$file"
}

write kernels/src/clean.cpp '#include "kvferry/kernels/block_layout.hpp"'

expect layering kernels/src/a.cpp '#include "kvferry/ipc/base/error.hpp"'
expect layering ipc/src/a.cpp '#include <kvferry/worker/client.hpp>'
expect layering cache_manager/src/a.cpp '#include "kvferry/worker/client.hpp"'
expect layering worker/src/a.cpp '#include "kvferry/cache_manager/mover.hpp"'
expect layering worker/src/a.cpp '#include "../../ipc/src/os/syscall.hpp"'
expect layering ipc/src/a.cpp '#include "support/child_process.hpp"'
expect layering worker/src/a.cpp '#include "cli/src/options.hpp"'
expect public-header ipc/include/kvferry/ipc/a.hpp '#include <boost/interprocess/mapped_region.hpp>'
expect public-header worker/include/kvferry/worker/a.hpp '#include <zmq.hpp>'
expect public-header worker/include/kvferry/worker/a.hpp '#include <msgpack.hpp>'
expect public-header worker/include/kvferry/worker/a.hpp '#include <spdlog/spdlog.h>'
expect cuda-memory worker/src/a.cpp 'cudaMalloc(&p, 4);'
expect shm worker/src/a.cpp 'int fd = ::shm_open(name, 0, 0);'
expect getenv ipc/src/a.cpp 'const char* home = std::getenv("HOME");'
expect stdout ipc/src/a.cpp 'std::cout << "hello";'
expect stdout cli/src/a.cpp 'std::cout << "hello";'
expect new ipc/src/a.cpp 'auto* leak = new Thing(1);'
expect fork ipc/src/a.cpp 'const pid_t pid = ::fork();'
expect using-namespace ipc/src/a.cpp 'using namespace std;'
expect sleep tests/ipc/a_test.cpp 'std::this_thread::sleep_for(wait);'
expect nolint ipc/src/a.cpp 'int a = 1;  // NOL''INT'
expect nolint ipc/src/a.cpp '// NOL''INTNEXTLINE: a reason' 'int a = 1;'
expect unfinished ipc/src/a.cpp "// TO""DO: later"
expect length ipc/src/a.cpp "$(yes '//' | head -n 600)"

accept worker/src/a.cpp '#include "kvferry/ipc/base/error.hpp"' '#include <spdlog/spdlog.h>'
accept tests/a.cpp '#include "kvferry/worker/client.hpp"' '#include "kvferry/cache_manager/mover.hpp"'
accept ipc/src/a.cpp '// a new day; never fork() here' 'log("using namespace in a text, new Thing");'
accept ipc/src/a.cpp '// lint-allow(new): lives for ever' 'auto* leak = new Thing(1);'
accept ipc/src/a.cpp 'return std::unique_ptr<Thing>(new Thing(1));'
accept ipc/src/a.cpp 'std::unique_ptr<Thing> thing(new Thing(1));'
accept ipc/src/a.cpp 'using namespace std::chrono_literals;'
accept ipc/src/a.cpp '// NOL''INTNEXTLINE(some-check): a reason' 'int a = 1;'

echo '// no licence' > "$tree/kernels/src/bare.cpp"
if "$check" "$tree" > /dev/null; then
  echo "a file without the licence header passed"
  failures=$((failures + 1))
fi
exit "$((failures > 0))"
