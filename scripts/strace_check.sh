#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# Usage: scripts/strace_check.sh [--program FILE] [--requests N] [--read LOG]...
#
# Runs `kvferry replay` on simulated devices under strace, with clears and re-inits, in both ownership
# roles, and with a mover, a worker and a manager killed in the middle; then looks at every call of all
# processes and threads that could wait. None may be without a time limit, but for:
#
#   idle waits      on a thread that the source declares idle there (scripts/waits.sh, wait-idle: it
#                   waits for work, so nothing is owed), on one condition variable per thread; the pipe
#                   whose end tells a process that its parent is gone, on the thread for it; event loops
#                   that have no timer set (time limit over 60 s), if an eventfd that wakes them is in
#                   their set
#   ZeroMQ          its background threads, which wait for their own sockets and mailboxes
#   brief waits     for a mutex, the last instructions of a thread, the end of a ZeroMQ context, room in
#                   a listener's backlog: each has ended within 5 s
#
# Everything else (poll, epoll, futex, wait4, locks of files, reads and writes of sockets, pipes and
# eventfds that block, …) without a limit is printed as BREACH and fails the check. A table is last.
#
#   --program FILE  another kvferry (default: build/release's, which is built first)
#   --requests N    of each run (default 60)
#   --read LOG      judges logs of strace -f -Y -y -ttt -T instead of running anything
#   --help          this text
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

program='' requests=60 logs=()
while (($#)); do
  case $1 in
    --help | -h) print_help && exit ;;
    --program | --requests | --read)
      (($# > 1)) || die "$1 needs a value"
      case $1 in
        --program) program=$(cd "$caller_directory" && realpath "$2") ;;
        --requests) requests=$2 ;;
        --read) logs+=("$(cd "$caller_directory" && realpath "$2")") ;;
      esac
      shift 2
      ;;
    *) die "unknown option '$1'; see --help" ;;
  esac
done

idle=$(scripts/waits.sh --idle-threads | paste -sd,)
judge() {
  python3 scripts/strace_waits.py "$idle" "$@"
}
if ((${#logs[@]})); then
  judge "${logs[@]}"
  exit
fi

command -v strace > /dev/null || die "strace is not installed; run scripts/setup.sh"
strace -o /dev/null true || die "strace cannot trace here; a container needs the capability SYS_PTRACE"
if [[ -z $program ]]; then
  mkdir -p build/strace
  build_with_tests release kvferry > build/strace/build.log ||
    die "the build failed; see build/strace/build.log"
  program=$root/build/release/cli/kvferry
fi

out=$root/build/strace
mkdir -p "$out"
rm -f "$out"/*.strace "$out"/*.out "$out"/*.json
short=$(mktemp -d /tmp/kvf-strace-XXXXXX) # paths of sockets are short
trap 'rm -rf "$short"' EXIT

calls=poll,ppoll,select,pselect6,epoll_create1,epoll_ctl,epoll_wait,epoll_pwait,epoll_pwait2,futex
calls+=,futex_waitv,read,recvfrom,recvmsg,accept,accept4,connect,sendmsg,sendto,wait4,waitid,fcntl
calls+=,flock,nanosleep,clock_nanosleep,pause,rt_sigtimedwait,rt_sigsuspend,socket,socketpair
calls+=,eventfd2,signalfd4,timerfd_create,pipe2,inotify_init1,pidfd_open,clone,clone3,vfork,fork

# Sessions that come back with more, in less device memory than all of them need.
python3 - "$requests" > "$short/trace" << 'END'
import json
import sys

for i in range(int(sys.argv[1])):
    session, turn = i % 20, i // 20
    blocks = [0] + [1000 * (session + 1) + b for b in range(1, 6 + 2 * (turn % 8))]
    print(json.dumps({"timestamp": 20 * i, "input_length": 512 * len(blocks), "output_length": 600,
                      "hash_ids": blocks}))
END

# replay NAME VICTIM OPTION...: VICTIM is a process to be killed in the middle, or none.
replay() {
  local name=$1 victim=$2 code=0 speed=1
  [[ $victim == none ]] || speed=0.4 # time for its successor
  shift 2
  local log=$out/$name.strace run=$short/$name
  strace -f -Y -y -ttt -T -s 16 -e trace="$calls" -o "$log" "$program" replay --device host --ranks 2 \
    --trace "$short/trace" --speed "$speed" --gpu-blocks 120 --in-flight 4 --verify full \
    --runtime-dir "$run" --report "$out/$name.json" "$@" \
    > "$out/$name.out" 2>&1 &
  local replay=$!
  if [[ $victim != none ]]; then
    # Once copies run, which their threads' names tell.
    grep -q -m 20 'kvf-store> .*sendmsg' < <(timeout 60 tail -n +1 --pid "$replay" -F "$log" 2> /dev/null) || true
    local pid
    pid=$(pgrep -f -- "^kvferry $victim .*$run" | head -n 1) || true
    [[ -n $pid ]] || die "$name: no $victim to kill; see ${out#"$root/"}/$name.out"
    kill -KILL "$pid"
  fi
  wait "$replay" || code=$?
  local see="see ${out#"$root/"}/$name.out"
  if [[ $victim == none ]]; then
    ((code == 0)) || die "$name: replay ended with exit code $code; $see"
  else
    # Not by its exit code: a host tier that was lost may have no hits.
    grep -q '"error": null' "$out/$name.json" || die "$name: replay did not end well; $see"
    grep -q '"restarts": [1-9]' "$out/$name.json" || die "$name: nothing was killed; $see"
  fi
}

started=$SECONDS
replay clears-worker none --cache-owner worker --clear-every 15
replay clears-mover none --cache-owner mover --clear-every 15
replay mover-killed mover --cache-owner worker
replay worker-killed worker --cache-owner mover
replay manager-killed manager --cache-owner worker
judge "$out"/*.strace
echo "5 runs of $requests requests in $((SECONDS - started)) s; logs under ${out#"$root/"}"
