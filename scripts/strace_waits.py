# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""Judges the waits in a log of strace; scripts/strace_check.sh explains the rules.

Usage: strace_waits.py IDLE_THREAD,... LOG...
"""

import collections
import re
import sys

# A wait without a time limit that is no idle one ends within this, also on a machine under load.
BRIEF_S = 5.0
# A longer time limit is as good as none.
LONG_MS = 60_000

LINE = re.compile(r"(\d+)(?:<([^>]*)>)? +(\d+\.\d+) (.*)")
UNFINISHED = re.compile(r"(\w+)\((.*) <unfinished \.\.\.>$")
RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)$")
WHOLE = re.compile(r"(\w+)\((.*)\)\s+= (.*)$")
TOOK = re.compile(r" <(\d+\.\d+)>$")
DESCRIPTOR = re.compile(r"^(\d+)<(.*?)>(?:,|$)")
QUIET_KINDS = ("socket:", "pipe:", "anon_inode:[eventfd]", "anon_inode:[signalfd]", "anon_inode:inotify",
               "anon_inode:[timerfd]", "anon_inode:[pidfd]", "UNIX", "TCP", "/dev/pts", "/dev/tty")
ZMQ_THREAD = re.compile(r"ZMQbg/")


class Process:
    """Descriptors of a process: numbers of those that do not block, and what epoll sets watch."""

    def __init__(self, parent=None):
        self.non_blocking = set(parent.non_blocking) if parent else set()
        self.of_zmq = set()
        self.watched = collections.defaultdict(set)


class Judge:
    def __init__(self, idle_threads):
        self.idle_threads = idle_threads
        self.parents = {}  # thread id: (who made it, whether both are one process)
        self.processes = {}  # by thread id, shared by the threads of a process
        self.open_calls = {}
        self.conditions = {}  # the one that an idle thread waits for, by file and thread
        self.rows = collections.defaultdict(lambda: [0, 0.0])
        self.breaches = []
        self.file = ""

    def process(self, thread):
        if thread not in self.processes:
            parent, shares = self.parents.get(thread, (None, False))
            known = None if parent is None else self.process(parent)
            self.processes[thread] = known if known and shares else Process(known)
        return self.processes[thread]

    def find_parents(self, path):
        """Who made which thread: a child often runs before the call that makes it has returned."""
        self.parents = {}
        flags = {}
        with open(path, encoding="utf-8", errors="replace") as log:
            for line in log:
                if "clone" not in line and "fork" not in line:
                    continue
                found = LINE.match(line)
                if not found or not re.match(r"(?:<\.\.\. )?v?(?:clone3?|fork)\b", found[4]):
                    continue
                thread = int(found[1])
                if "<..." not in found[4]:
                    flags[thread] = "CLONE_THREAD" in found[4]
                if made := re.search(r"\)\s+= (\d+)", found[4]):
                    self.parents[int(made[1])] = (thread, flags.get(thread, False))

    def count(self, row, took):
        entry = self.rows[row]
        entry[0] += 1
        entry[1] = max(entry[1], took)

    def breach(self, thread, name, time, why, text):
        self.breaches.append(f"{self.file}: {thread} ({name}) at {time:.6f}: {why}: {text[:160]}")

    def read(self, path):
        self.file = path.rsplit("/", 1)[-1]
        self.processes.clear()
        self.open_calls.clear()
        self.find_parents(path)
        last = 0.0
        with open(path, encoding="utf-8", errors="replace") as log:
            for number, line in enumerate(log, 1):
                found = LINE.match(line.rstrip("\n"))
                if not found:
                    sys.exit(f"{path}:{number}: not a line of strace -f -Y -ttt: {line.strip()}")
                thread, name, time, rest = int(found[1]), found[2] or "?", float(found[3]), found[4]
                last = time
                self.line(thread, name, time, rest)
        for thread, (call, args, start, name) in list(self.open_calls.items()):
            self.finish(thread, name, call, args, "?", start, last - start, False)
        self.open_calls.clear()

    def line(self, thread, name, time, rest):
        if rest.startswith("+++"):
            if thread in self.open_calls:
                call, args, start, name = self.open_calls.pop(thread)
                self.finish(thread, name, call, args, "?", start, time - start, True)
            return
        if rest.startswith("---"):
            return
        if found := UNFINISHED.match(rest):
            self.open_calls[thread] = (found[1], found[2], time, name)
            return
        if found := RESUMED.match(rest):
            if thread not in self.open_calls:
                return
            call, args, start, name = self.open_calls.pop(thread)
            text = found[2]
            ended = re.match(r"(.*)\)\s+= (.*)$", text)
            more, result = (ended[1], ended[2]) if ended else (text, "?")
            if "<unfinished" in more:
                more, result = "", "?"
            self.finish(thread, name, call, args + more, result, start, time - start, True)
            return
        if found := WHOLE.match(rest):
            took = TOOK.search(rest)
            self.finish(thread, name, found[1], found[2], found[3], time,
                        float(took[1]) if took else 0.0, True)

    def finish(self, thread, name, call, args, result, time, took, ended):
        """One call, complete. ended: false for one that the log leaves open."""
        args = args.removesuffix(" <unfinished ...>")  # ended by a kill
        process = self.process(thread)
        self.follow_descriptors(process, call, args, result)
        handler = getattr(self, "on_" + call, None)
        if handler:
            handler(process, thread, name, args, result, time, took, ended)

    # Descriptors

    def follow_descriptors(self, process, call, args, result):
        made = re.match(r"(\d+)<", result)
        if call in ("socket", "accept4", "eventfd2", "signalfd4", "timerfd_create", "inotify_init1",
                    "accept", "epoll_create1", "pidfd_open") and made:
            fd = int(made[1])
            process.watched.pop(fd, None)
            process.of_zmq.discard(fd)
            if "NONBLOCK" in args:
                process.non_blocking.add(fd)
            else:
                process.non_blocking.discard(fd)
                if call == "eventfd2":
                    process.of_zmq.add(fd)
        elif call in ("pipe2", "socketpair"):
            for fd in re.findall(r"(\d+)<", args):
                (process.non_blocking.add if "NONBLOCK" in args else process.non_blocking.discard)(int(fd))
        elif call == "fcntl":
            fd = DESCRIPTOR.match(args)
            if fd and "F_SETFL" in args:
                (process.non_blocking.add if "O_NONBLOCK" in args else process.non_blocking.discard)(int(fd[1]))
            elif fd and "F_DUPFD" in args and made:
                (process.non_blocking.add if int(fd[1]) in process.non_blocking
                 else process.non_blocking.discard)(int(made[1]))
        elif call == "epoll_ctl":
            found = re.match(r"(\d+)<[^,]*, EPOLL_CTL_(ADD|DEL), (\d+)<(.*?)>(?:,|$)", args)
            if found:
                watched = process.watched[int(found[1])]
                (watched.add if found[2] == "ADD" else watched.discard)((int(found[3]), found[4]))

    # Waits

    def limited(self, call, took):
        self.count(f"{call} with a time limit", took)

    def brief(self, what, thread, name, text, time, took):
        if took > BRIEF_S:
            self.breach(thread, name, time, f"{what} took {took:.1f} s, without a time limit", text)
        self.count(f"{what}: no time limit, has to end within {BRIEF_S:g} s", took)

    def idle(self, what, took):
        self.count(f"idle: {what}", took)

    def on_poll(self, process, thread, name, args, result, time, took, ended, call="poll"):
        text = f"{call}({args}"
        # Of a process that is being killed, strace shows where the descriptors are, not which.
        timeout = re.search(r"(?:\]|^0x[0-9a-f]+), \d+, (-?\d+)$|^NULL, 0, (-?\d+)$", args.strip())
        if call == "ppoll" or not timeout:
            if re.search(r", NULL, (?:NULL|\[.*\]), \d+$", args) or not timeout and call != "ppoll":
                self.breach(thread, name, time, "no time limit", text)
            else:
                self.limited(call, took)
            return
        limit = int(timeout[1] or timeout[2])
        if limit >= 0:
            if limit > LONG_MS:
                self.count(f"{call} with a time limit of over {LONG_MS // 1000} s, of a caller", took)
            self.limited(call, took)
        elif ZMQ_THREAD.match(name):
            self.idle("ZeroMQ's threads, in their own sockets and mailboxes", took)
        elif name == "kvf-parent" and name in self.idle_threads and re.match(r"\[\{fd=\d+<pipe:", args):
            self.idle("kvf-parent, the pipe of the process that started this one", took)
        elif self.is_zmq_mailbox(process, args):
            self.brief("the end of a ZeroMQ context", thread, name, text, time, took)
        else:
            self.breach(thread, name, time, "no time limit", text)

    @staticmethod
    def is_zmq_mailbox(process, args):
        """ZeroMQ makes its eventfds without EFD_NONBLOCK, and sets it after; ours are made with it."""
        found = re.fullmatch(r"\[\{fd=(\d+)<anon_inode:\[eventfd\]>, events=POLLIN\}\], 1, -1", args.strip())
        return bool(found) and int(found[1]) in process.of_zmq & process.non_blocking

    def on_ppoll(self, *call):
        self.on_poll(*call, call="ppoll")

    def on_select(self, process, thread, name, args, result, time, took, ended):
        if args.rstrip().endswith("NULL"):
            self.breach(thread, name, time, "no time limit", f"select({args}")
        else:
            self.limited("select", took)

    def on_pselect6(self, process, thread, name, args, result, time, took, ended):
        if re.search(r"NULL, (?:NULL|\{.*\})$", args) and "tv_sec" not in args:
            self.breach(thread, name, time, "no time limit", f"pselect6({args}")
        else:
            self.limited("pselect6", took)

    def on_epoll_wait(self, process, thread, name, args, result, time, took, ended):
        limit = re.search(r", (-?\d+)(?:, NULL, 8)?$", args.strip())
        epoll = re.match(r"(\d+)<", args)
        if not limit:
            # Killed meanwhile: the log does not say how long it would have waited.
            self.count("epoll_wait that a kill ended", took)
            return
        watched = process.watched[int(epoll[1])] if epoll else set()
        wakes = any("[eventfd]" in kind for _, kind in watched)
        if int(limit[1]) < 0:
            if ZMQ_THREAD.match(name):
                self.idle("ZeroMQ's threads, in their own sockets and mailboxes", took)
            else:
                self.breach(thread, name, time, "no time limit", f"epoll_wait({args}")
        elif int(limit[1]) > LONG_MS:
            if wakes:
                self.idle("event loops without a timer, with a wake-up eventfd in their set", took)
            else:
                self.breach(thread, name, time, f"a time limit of {int(limit[1]) // 1000} s and no eventfd "
                            "that wakes", f"epoll_wait({args}")
        else:
            self.limited("epoll_wait", took)

    on_epoll_pwait = on_epoll_wait

    def on_futex(self, process, thread, name, args, result, time, took, ended):
        fields = [field.strip() for field in args.split(",")]
        operation = fields[1] if len(fields) > 1 else ""
        if "FUTEX_WAIT" not in operation and "FUTEX_LOCK" not in operation:
            return
        text = f"futex({args}"
        if "tv_sec" in args:
            self.limited("futex", took)
        # std::atomic::wait() has no private ones.
        elif operation.startswith("FUTEX_WAIT_BITSET_PRIVATE") or (
                operation == "FUTEX_WAIT" and name in self.idle_threads and name != "kvferry"):
            condition = int(fields[0], 16)
            if name in self.idle_threads and name != "kvferry":
                # The words of one condition variable lie within 48 bytes.
                if abs(self.conditions.setdefault((self.file, thread), condition) - condition) > 48:
                    self.breach(thread, name, time, "a second condition without a time limit, on a thread "
                                "that may wait for work alone", text)
                self.idle(f"{name}, which has no work", took)
            else:
                self.breach(thread, name, time, "a condition without a time limit", text)
        elif operation.startswith("FUTEX_WAIT_PRIVATE"):
            self.brief("a mutex", thread, name, text, time, took)
        elif operation == "FUTEX_WAIT_BITSET|FUTEX_CLOCK_REALTIME":
            self.brief("the end of a thread", thread, name, text, time, took)
        elif ZMQ_THREAD.match(name):
            self.idle("ZeroMQ's threads, in their own sockets and mailboxes", took)
        else:
            self.breach(thread, name, time, "no time limit", text)

    def blocking(self, process, thread, name, call, args, time, took):
        found = DESCRIPTOR.match(args)
        if not found:
            return
        fd, kind = int(found[1]), found[2]
        if not kind.startswith(QUIET_KINDS):
            return
        if fd in process.non_blocking or "MSG_DONTWAIT" in args:
            self.count("reads and writes that do not wait", took)
            return
        self.breach(thread, name, time, f"{call} on a descriptor that blocks", f"{call}({args}")

    def on_read(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "read", args, time, took)

    def on_recvfrom(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "recvfrom", args, time, took)

    def on_recvmsg(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "recvmsg", args, time, took)

    def on_accept4(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "accept4", args, time, took)

    on_accept = on_accept4

    def on_sendmsg(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "sendmsg", args, time, took)

    def on_sendto(self, process, thread, name, args, result, time, took, ended):
        self.blocking(process, thread, name, "sendto", args, time, took)

    def on_connect(self, process, thread, name, args, result, time, took, ended):
        found = DESCRIPTOR.match(args)
        if found and int(found[1]) in process.non_blocking:
            self.count("reads and writes that do not wait", took)
        else:
            # Limited by SO_SNDTIMEO, which the log does not show for certain.
            self.brief("connect", thread, name, f"connect({args}", time, took)

    def on_wait4(self, process, thread, name, args, result, time, took, ended):
        if "WNOHANG" in args:
            self.count("looks for ended children", took)
        else:
            self.breach(thread, name, time, "no time limit", f"wait4({args}")

    on_waitid = on_wait4

    def on_fcntl(self, process, thread, name, args, result, time, took, ended):
        if "SETLKW" in args:
            self.breach(thread, name, time, "no time limit", f"fcntl({args}")

    def on_flock(self, process, thread, name, args, result, time, took, ended):
        if "LOCK_NB" not in args and "LOCK_UN" not in args:
            self.breach(thread, name, time, "no time limit", f"flock({args}")

    def forever(self, process, thread, name, args, result, time, took, ended):
        self.breach(thread, name, time, "no time limit", args)

    on_pause = on_rt_sigsuspend = forever

    def on_rt_sigtimedwait(self, process, thread, name, args, result, time, took, ended):
        if "tv_sec" in args:
            self.limited("rt_sigtimedwait", took)
        else:
            self.breach(thread, name, time, "no time limit", f"rt_sigtimedwait({args}")

    def on_clock_nanosleep(self, process, thread, name, args, result, time, took, ended):
        self.limited("sleep", took)

    on_nanosleep = on_clock_nanosleep

    def report(self):
        width = max((len(row) for row in self.rows), default=0)
        print(f"{'waits':<{width}}  {'calls':>7}  {'longest':>9}")
        for row, (calls, longest) in sorted(self.rows.items()):
            print(f"{row:<{width}}  {calls:>7}  {longest * 1000:>6.0f} ms")
        for breach in self.breaches[:200]:
            print("BREACH " + breach)
        total = sum(calls for calls, _ in self.rows.values())
        print(f"{total} waits and calls that might be, {len(self.breaches)} breaches")
        # A log of nothing proves nothing.
        return 1 if self.breaches or not total else 0


def main():
    judge = Judge(set(sys.argv[1].split(",")))
    for path in sys.argv[2:]:
        judge.read(path)
    sys.exit(judge.report())


main()
