#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# waits.sh must find each planted wait that says nothing of itself, or has no limit, and nothing else;
# and it must find none in the sources as they are.
set -euo pipefail
waits=$1/scripts/waits.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/ipc/src"
file=$tree/ipc/src/a.cpp
failures=0

# expect TEXT LINE...: the lines are refused with this text.
expect() {
  local text=$1 output
  shift
  printf '%s\n' "$@" > "$file"
  if output=$("$waits" "$tree") || [[ $output != *"ipc/src/a.cpp:"*"$text"* ]]; then
    printf 'planted: %s\nwanted: %s\ngot: %s\n' "$*" "$text" "$output"
    failures=$((failures + 1))
  fi
}

# accept TEXT LINE...: no breach, and the table has this text.
accept() {
  local text=$1 output
  shift
  printf '%s\n' "$@" > "$file"
  if ! output=$("$waits" "$tree") || [[ $output != *"$text"* ]]; then
    printf 'allowed: %s\nwanted: %s\ngot: %s\n' "$*" "$text" "$output"
    failures=$((failures + 1))
  fi
}

none="can wait and has no '// wait' comment"
expect "$none" '::poll(&fd, 1, deadline.poll_timeout_ms());'
expect "$none" 'while (poll(&fd, 1, kTime) < 0) {' '}'
expect "$none" 'const int n = ::epoll_wait(fd, events, 8, 100);'
expect "$none" 'changed_.wait(lock, [this] { return done_; });'
expect "$none" '(void)changed_.wait_until(lock, when);'
expect "$none" 'thread_.join();'
expect "$none" 'return valid() && poll_until(fd, POLLIN, deadline) > 0;'
expect "$none" 'std::future<void> stands = promise.get_future();'
expect "$none" 'waitpid(pid, nullptr, 0);'
expect "$none" '::flock(fd, LOCK_EX);'
expect "$none" '::fcntl(fd, F_OFD_SETLKW, &lock);'
expect "$none" 'const auto n = ::read(fd, data, size);'
expect "$none" '::recvmsg(fd, &message, 0);'
expect "$none" 'zmq_msg_recv(&message, socket, 0);'
expect "$none" '::syscall(SYS_futex, word, FUTEX_WAIT, 0);'
expect "$none" '::pause();'
expect "$none" 'cudaStreamSynchronize(stream);'
expect "$none" 'KVFERRY_CUDA_TRY(cudaFree(pointer));'
expect "$none" 'boost::interprocess::named_mutex mutex;'
expect "$none" 'Deadline last = Deadline::at(TimePoint::max());'
expect 'has no time limit, but is marked' '// wait: work; kTime; nothing' 'poll(&fd, kTime, -1);'
expect 'has no time limit, but is marked' '// wait: work; lock; nothing' 'changed_.wait(lock, pred);'
expect 'has no time limit, but is marked' '// wait: a child; pid; nothing' 'waitpid(pid, nullptr, 0);'
expect 'does not begin with a name' '// wait: work; kOther; nothing' '::poll(&fd, 1, kTime);'
expect 'does not begin with a name' '// wait: work; 5 s; nothing' '::poll(&fd, 1, 5000);'
expect 'needs 3 fields' '// wait: work; kTime' '::poll(&fd, 1, kTime);'
expect "is 'thread NAME'" '// wait-idle: work; submit(); any thread' 'changed_.wait(lock, pred);'
expect "unknown kind 'wait-long'" '// wait-long: work; kTime; nothing' '::poll(&fd, 1, kTime);'
expect 'without a call that waits' '// wait: work; kTime; nothing' 'int a = 0;'
expect "$none" '// wait: work; kTime; nothing' '::poll(&fd, 1, kTime);' '::poll(&fd, 1, kTime);'

accept '0 breaches' 'int wait = 0;  // poll( and thread_.join() in a comment' 'log("changed_.wait(lock)");'
accept '0 breaches' 'Status poll(std::size_t max);' 'void read(Id& id);' 'writer.read(id);'
accept '0 breaches' '::recvmsg(fd, &message, MSG_DONTWAIT);' '::flock(fd, LOCK_SH | LOCK_NB);'
accept '0 breaches' 'const pid_t ended = waitpid(pid, &status, WNOHANG);'
accept 'kTime = 250 ms' 'constexpr std::chrono::milliseconds kTime{250};' \
  '// wait: work; kTime; nothing' '::poll(&fd, 1, kTime.count());'
accept 'its pidfd and connection' '// wait: a reply that may be' '// long in coming; deadline, of the' \
  '// caller; its pidfd and connection' 'const int ready =' '    ::poll(&fd, 1, deadline.poll_timeout_ms());'
accept 'idle, no limit: thread kvf-x' '// wait-idle: work; submit(); thread kvf-x' 'changed_.wait(lock, pred);'
accept '1 of the driver' '// wait-driver: the free; own work has ended' 'cudaFree(pointer);'
accept '0 waits' '// wait-none: an eventfd' 'const auto n = ::read(fd, data, size);'

"$waits" "$1" > "$tree/table" || {
  tail -n 20 "$tree/table"
  failures=$((failures + 1))
}
# Nothing can be found where nothing is looked at.
grep -qE '^[5-9][0-9] waits|^[0-9]{3,} waits' "$tree/table" || {
  echo "too few waits: $(tail -n 1 "$tree/table")"
  failures=$((failures + 1))
}

# Deadlines in documents: "| 5 s | `FILE:NAME` |" in one, "| `NAME` | 5 s |" of LeaseTimeouts in the other.
in_ms() {
  case $1 in
    *' ms') echo "${1% ms}" ;;
    *' s') echo "$((${1% s} * 1000))" ;;
    *) echo "no time: $1" ;;
  esac
}
declare -A values
while read -r name value; do
  values[$name]=$value
done < <("$waits" --values "$1")
checked=0
compare() { # NAME TIME DOCUMENT
  checked=$((checked + 1))
  if [[ $(in_ms "$2") != $(in_ms "${values[$1]:-nothing}") ]]; then
    echo "$3 says $1 is $2; the source says ${values[$1]:-nothing}"
    failures=$((failures + 1))
  fi
}
# shellcheck disable=SC2016 # backquotes of Markdown
while IFS='|' read -r time name; do
  compare "$name" "$time" docs/reliability.md
done < <(sed -nE 's/.*\| ([0-9]+ m?s) \| `([a-z_/.]+:[A-Za-z_]+)` \|.*/\1|\2/p' "$1/docs/reliability.md")
# shellcheck disable=SC2016
while IFS='|' read -r name time; do
  compare "ipc/include/kvferry/ipc/lease/lease.hpp:$name" "$time" docs/handshake.md
done < <(sed -nE 's/^\| `([a-z_]+)` \| ([0-9]+ m?s) \|.*/\1|\2/p' "$1/docs/handshake.md")
if ((checked < 25)); then
  echo "only $checked deadlines found in the documents"
  failures=$((failures + 1))
fi
exit "$((failures > 0))"
