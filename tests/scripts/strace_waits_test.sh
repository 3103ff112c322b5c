#!/usr/bin/env bash
# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
# strace_check.sh must name each wait without a limit in a log of strace, and nothing in one whose
# waits are limited, idle, brief or do not wait. The lines are such as strace 6.1 writes.
set -euo pipefail
check=$1/scripts/strace_check.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0

# write NAME CALL...: a log of one thread; "CALL ..." ends after 1 ms, "S CALL ..." after S seconds,
# "- CALL" never.
write() {
  local thread=$1 time=100 line took
  shift
  for line in "$@"; do
    took=0.001
    if [[ $line =~ ^([0-9.]+|-)\ (.*) ]]; then
      took=${BASH_REMATCH[1]} line=${BASH_REMATCH[2]}
    fi
    if [[ $took == - ]]; then
      echo "7<$thread> $time.000000 ${line%)*} <unfinished ...>"
      time=$((time + 60))
      echo "7<$thread> $time.000000 +++ killed by SIGKILL +++"
    else
      echo "7<$thread> $time.000000 $line <$took>"
    fi
    time=$((time + 1))
  done
}

# All logs of a kind are judged at once; a breach names its log.
bad=() good=() wanted=() rows=()
expect() { # TEXT NAME CALL...
  wanted+=("$1")
  bad+=(--read "$folder/bad${#wanted[@]}")
  write "${@:2}" > "$folder/bad${#wanted[@]}"
}
accept() { # TEXT NAME CALL...
  rows+=("$1")
  good+=(--read "$folder/good${#rows[@]}")
  write "${@:2}" > "$folder/good${#rows[@]}"
}

event='anon_inode:[eventfd]' epoll='anon_inode:[eventpoll]'
ours="eventfd2(0, EFD_CLOEXEC|EFD_NONBLOCK) = 4<$event>"
zmq="eventfd2(0, EFD_CLOEXEC) = 4<$event>"
any=FUTEX_BITSET_MATCH_ANY
condition="FUTEX_WAIT_BITSET_PRIVATE|FUTEX_CLOCK_REALTIME, 0, NULL, $any"

expect 'no time limit: poll(' kvferry "$ours" "poll([{fd=4<$event>, events=POLLIN}], 1, -1) = 1"
expect 'no time limit: poll(' kvf-lease "- poll([{fd=4<socket:[9]>, events=POLLIN}], 1, -1)"
expect 'no time limit: poll(' kvf-parent "- poll([{fd=4<socket:[9]>, events=POLLIN}], 1, -1)"
expect 'no time limit: poll(' kvferry "- poll(0x7ffb88b59970, 1, -1)"
expect 'no time limit: epoll_wait(' kvf-lease "epoll_wait(3<$epoll>, [], 64, -1) = 0"
expect 'and no eventfd that wakes' kvferry \
  "epoll_ctl(3<$epoll>, EPOLL_CTL_ADD, 5<socket:[9]>, {events=EPOLLIN}) = 0" \
  "epoll_wait(3<$epoll>, [], 64, 600000) = 0"
expect 'a condition without a time limit' kvf-lease "futex(0x100, $condition) = 0"
expect 'a condition without a time limit' kvferry "- futex(0x100, $condition)"
expect 'a second condition without a time limit' kvf-store "futex(0x100, $condition) = 0" \
  "futex(0x104, $condition) = 0" "futex(0x200, $condition) = 0"
expect 'no time limit: futex(' kvferry 'futex(0x100, FUTEX_WAIT, 2147483648, NULL) = 0'
expect 'no time limit: futex(' kvf-lease 'futex(0x100, FUTEX_WAIT, 5, NULL) = 0'
expect 'a second condition without a time limit' kvf-store 'futex(0x100, FUTEX_WAIT, 5, NULL) = 0' \
  'futex(0x200, FUTEX_WAIT, 5, NULL) = 0'
expect 'a mutex took 9.0 s' kvferry '9.0 futex(0x100, FUTEX_WAIT_PRIVATE, 2, NULL) = 0'
expect 'the end of a thread took 60.0 s' kvferry \
  "- futex(0x100, FUTEX_WAIT_BITSET|FUTEX_CLOCK_REALTIME, 8, NULL, $any)"
expect 'the end of a ZeroMQ context took 7.5 s' kvferry "$zmq" \
  "fcntl(4<$event>, F_SETFL, O_RDWR|O_NONBLOCK) = 0" \
  "7.5 poll([{fd=4<$event>, events=POLLIN}], 1, -1) = 1"
expect 'connect took 6.0 s' kvferry '6.0 connect(5<socket:[9]>, {sa_family=AF_UNIX}, 110) = 0'
expect 'read on a descriptor that blocks' kvferry "$zmq" "read(4<$event>, \"x\", 8) = 8"
expect 'read on a descriptor that blocks' kvferry '- read(4<pipe:[9]>, )'
expect 'recvmsg on a descriptor that blocks' kvferry 'recvmsg(5<socket:[9]>, {msg_iov=[]}, 0) = 4'
expect 'accept4 on a descriptor that blocks' kvferry '- accept4(5<socket:[9]>, NULL, NULL, SOCK_NONBLOCK)'
expect 'no time limit: wait4(' kvferry 'wait4(9<kvferry>, [{WIFEXITED(s)}], 0, NULL) = 9'
expect 'no time limit: fcntl(' kvferry 'fcntl(5</tmp/lock>, F_OFD_SETLKW, {l_type=F_WRLCK}) = 0'
expect 'no time limit: flock(' kvferry 'flock(5</tmp/lock>, LOCK_EX) = 0'
expect 'no time limit' kvferry '- pause()'
expect 'no time limit: rt_sigtimedwait(' kvferry '- rt_sigtimedwait([USR1], NULL, NULL, 8)'

accept 'poll with a time limit' kvferry "60.1 poll([{fd=4<$event>, events=POLLIN}], 1, 250) = 0"
accept 'poll with a time limit' kvferry "- poll(0x7ffb88b59970, 1, 0)"
accept 'futex with a time limit' kvf-lease \
  "futex(0x100, FUTEX_WAIT_BITSET_PRIVATE, 0, {tv_sec=9, tv_nsec=0}, $any) = -1 ETIMEDOUT"
accept 'epoll_wait with a time limit' kvferry "epoll_wait(3<$epoll>, [], 64, 250) = 0"
accept 'idle: event loops without a timer' kvferry "$ours" \
  "epoll_ctl(3<$epoll>, EPOLL_CTL_ADD, 4<$event>, {events=EPOLLIN}) = 0" \
  "900.5 epoll_wait(3<$epoll>, [], 64, 999999) = 0"
accept 'idle: kvf-store, which has no work' kvf-store "900.5 futex(0x100, $condition) = 0" \
  "futex(0x104, $condition) = 0"
accept 'idle: kvf-store, which has no work' kvf-store '900.5 futex(0x100, FUTEX_WAIT, 5, NULL) = 0'
accept 'idle: kvf-parent' kvf-parent '- poll([{fd=3<pipe:[9]>, events=POLLIN}], 1, -1)'
accept "idle: ZeroMQ's threads" ZMQbg/IO/0 "900.5 epoll_wait(3<$epoll>, [], 256, -1) = 1"
accept 'the end of a ZeroMQ context' kvferry "$zmq" \
  "fcntl(4<$event>, F_SETFL, O_RDWR|O_NONBLOCK) = 0" "poll([{fd=4<$event>, events=POLLIN}], 1, -1) = 1"
accept 'a mutex: no time limit' kvferry 'futex(0x100, FUTEX_WAIT_PRIVATE, 2, NULL) = 0'
accept 'reads and writes that do not wait' kvferry "$ours" "read(4<$event>, 0x1, 8) = -1 EAGAIN (no)" \
  'recvmsg(5<socket:[9]>, {msg_iov=[]}, MSG_DONTWAIT) = 4' 'read(6</etc/hosts>, "x", 9) = 1'
accept 'looks for ended children' kvferry 'wait4(9, NULL, WNOHANG, NULL) = 0'
# Calls of two threads, one within the other.
expect '8 (kvf-agent) at 100.500000: no time limit: poll(' kvferry "$ours" \
  "poll([{fd=4<$event>, events=POLLIN}], 1, 9) = 0"
last=$folder/bad${#wanted[@]}
sed -i '1a 8<kvf-agent> 100.5 poll([{fd=5<socket:[1]>, events=POLLIN}], 1, -1 <unfinished ...>' "$last"
echo '8<kvf-agent> 103.5 <... poll resumed>) = 1 ([{fd=5, revents=POLLIN}]) <3.0>' >> "$last"

fail() {
  echo "$*"
  failures=$((failures + 1))
}
output=$("$check" "${bad[@]}") && fail "logs full of waits without a limit passed"
for ((i = 0; i < ${#wanted[@]}; ++i)); do
  grep -qF "${wanted[i]}" <(grep "^BREACH bad$((i + 1)): " <<< "$output") ||
    fail "wanted: ${wanted[i]}; in: $(cat "$folder/bad$((i + 1))")"
done
output=$("$check" "${good[@]}") || fail "refused: $(grep ^BREACH <<< "$output")"
for row in "${rows[@]}"; do
  [[ $output == *"$row"* ]] || fail "not in the table: $row"
done

# What is no log, or a log of nothing, shows nothing.
echo 'no log' > "$folder/other"
: > "$folder/empty"
for file in other empty; do
  if "$check" --read "$folder/$file" > /dev/null 2>&1; then
    fail "a log that is $file passed"
  fi
done
exit "$((failures > 0))"
