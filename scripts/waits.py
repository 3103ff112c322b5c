# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""The waits of the product's sources; scripts/waits.sh explains it."""

import pathlib
import re
import sys

FOLDERS = ("kernels", "ipc", "cache_manager", "worker", "cli")
SUFFIXES = (".cpp", ".hpp", ".cu", ".cuh")
KINDS = {"wait": 3, "wait-idle": 3, "wait-brief": 2, "wait-driver": 2, "wait-none": 1}
# How far above its call a marker may stand: a statement that clang-format has broken.
REACH = 7

GLOBAL = r"(?<![A-Za-z0-9_.>:])(?:::)?"
WAITING = "|".join(
    [
        GLOBAL + r"(?:poll_until|poll|ppoll|select|pselect|epoll_p?wait2?|wait3|wait4|waitid|waitpid|flock|lockf|"
        r"recvmsg|recvfrom|sendmsg|readv|writev|preadv2|pwritev2|getrandom|pause|sigwait|sigwaitinfo|"
        r"sigtimedwait|sigsuspend|nanosleep|clock_nanosleep|usleep|sleep|popen|system|getaddrinfo|"
        r"pthread_join|syscall\(SYS_(?:futex|p?poll|epoll_p?wait|wait\w+|rt_sigtimedwait|\w*nanosleep))\b",
        # Names that methods have as well: a system call is written with '::' here.
        r"(?<![A-Za-z0-9_>])::(?:accept4?|recv|send|sendto|connect|read|write)\(",
        r"(?:\.|->)(?:wait|wait_for|wait_until|wait_end|wait_idle|wait_death|receive|join|try_acquire_for|arrive_and_wait)\(",
        r"\bF_(?:OFD_)?SETLKW\b|\bF_LOCK\b",
        r"std::this_thread::(?:sleep_for|sleep_until|yield)\(",
        r"\bzmq_(?:poll|recv|send|msg_recv|msg_send|ctx_term|ctx_destroy)\(|zmq::poll\(|zmq::context_t\s+\w+;",
        r"std::(?:jthread|thread|async|future|shared_future|barrier|latch|counting_semaphore|"
        r"binary_semaphore|atomic_wait)\b(?!::)",
        r"\b(?:interprocess|named)_(?:\w+_)?(?:mutex|condition|semaphore)\b",
        r"\bcuda(?:Device|Stream|Event)Synchronize\(|\bcu(?:Ctx|Stream|Event)Synchronize\(",
        r"\bcudaMem(?:cpy|set)(?:2D|3D)?\(|\bcudaFree(?:Host)?\(|\bcudaHost(?:Alloc|Register|Unregister)\(",
        r"\bcudaIpcCloseMemHandle\(|\bcudaStreamDestroy\(|\bcuda(?:Event)Destroy\(|\bmem_unmap\b\(",
        r"\bcomm_abort\(",
    ]
)
WAITING_RE = re.compile(WAITING)
# In the statement of a call: it does not wait.
AT_ONCE = re.compile(r"MSG_DONTWAIT|LOCK_NB|LOCK_UN|ZMQ_DONTWAIT|WNOHANG|zmq::(?:recv|send)_flags::dontwait")
INFINITE = re.compile(r"(?:TimePoint|Duration|time_point|duration)\w*(?:<[^>]*>)?::max\(\)")
DECLARES = re.compile(r"[A-Za-z0-9_>&*\]]\s+[&*]?$")
KEYWORD = re.compile(r"\b(?:return|else|case|co_return|throw|and|or|not)\s+$")
MARKER = re.compile(r"//\s*(wait(?:-[a-z]+)?): (.*)$")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*(?:->)?[A-Za-z0-9_.]*")
CONSTANT = re.compile(r"\bk[A-Z][A-Za-z0-9]*\b")


def code_of(line):
    """The line without texts and comments."""
    line = re.sub(r'"([^"\\]|\\.)*"', '""', line)
    return re.sub(r"//.*", "", line)


class Source:
    def __init__(self, root, path):
        self.name = str(path.relative_to(root))
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.code = [code_of(line) for line in self.lines]


class Registry:
    """Markers by the line that their comment ends on."""

    def __init__(self, source):
        self.by_end = {}
        lines = source.lines
        at = 0
        while at < len(lines):
            found = MARKER.search(lines[at])
            if not found:
                at += 1
                continue
            start, text = at, found.group(2).strip()
            own_line = lines[at].lstrip().startswith("//")
            while own_line and at + 1 < len(lines) and re.match(r"\s*// ", lines[at + 1]):
                if MARKER.search(lines[at + 1]):
                    break
                at += 1
                text += " " + lines[at].strip()[3:].strip()
            self.by_end[at] = [found.group(1), text, start, False]
            at += 1

    def take(self, line):
        """The nearest unused marker on this line or a few lines above it."""
        for at in range(line, max(-1, line - REACH), -1):
            marker = self.by_end.get(at)
            if marker:
                if marker[3]:
                    return None
                marker[3] = True
                return marker
        return None


def statement_of(source, line):
    """Code from the line to the end of its statement; and a little of what is above it."""
    text = ""
    for at in range(line, min(len(source.code), line + 12)):
        text += source.code[at] + " "
        if re.search(r"[;{]\s*$", source.code[at].rstrip() + " "):
            break
    above = " ".join(source.code[max(0, line - 3) : line])
    return above, text


def is_declaration(code, found):
    """`Status connect(` declares; `return connect(` and `= connect(` call."""
    before = code[: found.start()]
    if found.group(0).startswith((".", "->", "::", "std::", "zmq")):
        return False
    if KEYWORD.search(before) or before.rstrip().endswith(("&&", "||")):
        return False
    return bool(DECLARES.search(before))


def is_unlimited(call, statement):
    """A primitive that is called without a time limit."""
    name = call.strip(".->:(")
    if name in ("poll", "epoll_wait", "epoll_pwait", "ppoll"):
        return bool(re.search(r"(?:p?poll|epoll_p?wait)\([^;]*,\s*(?:-1|nullptr)\s*\)", statement))
    if name == "wait":
        return bool(re.search(r"(?:\.|->)wait\(\s*(?:lock\b|\))", statement))
    return name in ("join", "waitpid", "waitid", "wait4", "pause", "sigwait", "sigsuspend", "flock",
                    "pthread_join", "F_SETLKW", "F_OFD_SETLKW", "recv", "recvmsg", "read", "accept",
                    "accept4", "arrive_and_wait", "acquire", "get")


class Values:
    """What constants are, as they are written."""

    def __init__(self, sources):
        self.by_name = {}
        definition = re.compile(
            r"constexpr\s[^;=({]*?\b(k[A-Z]\w*)\s*(?:=\s*([^;]*)|\{([^;]*)\});|"
            r"std::chrono::milliseconds\s+(\w+)\{([\d']+)\};")
        for source in sources:
            text = "\n".join(source.code)
            for found in definition.finditer(text):
                name = found.group(1) or found.group(4)
                value = found.group(2) or found.group(3) or found.group(5)
                head = found.group(0)
                value = self.spell(head, " ".join(value.split()))
                self.by_name.setdefault(name, {})[source.name] = value

    @staticmethod
    def spell(head, value):
        if value.startswith("milliseconds("):
            value = "std::chrono::" + value
        found = re.fullmatch(r"(?:std::chrono::)?(milliseconds|seconds|hours|minutes)[({]([\d']+)[)}]", value)
        if found:
            unit = {"milliseconds": "ms", "seconds": "s", "minutes": "min", "hours": "h"}[found.group(1)]
            return found.group(2).replace("'", "") + " " + unit
        found = re.fullmatch(r"([\d']+)(ms|s|min|h)", value)
        if found:
            return found.group(1) + " " + found.group(2)
        if re.fullmatch(r"[\d']+", value):
            number = value.replace("'", "")
            if "milliseconds" in head or re.search(r"Ms\b", head):
                return number + " ms"
            if "seconds" in head:
                return number + " s"
            return number
        return value

    def of(self, name, file):
        places = self.by_name.get(name, {})
        stem = re.sub(r"\.\w+$", "", file)
        for place, value in places.items():
            if place == file or re.sub(r"\.\w+$", "", place) == stem:
                return value
        values = set(places.values())
        return values.pop() if len(values) == 1 else None

    def annotate(self, text, file):
        def one(found):
            value = self.of(found.group(0), file)
            return f"{found.group(0)} = {value}" if value else found.group(0)

        return CONSTANT.sub(one, text)


def check(source, values, report):
    registry = Registry(source)
    rows = []
    for number, code in enumerate(source.code):
        if re.match(r"\s*#", code):
            continue
        calls = [m for m in WAITING_RE.finditer(code) if not is_declaration(code, m)]
        infinite = INFINITE.search(code)
        if infinite:
            calls.append(infinite)
        for found in calls:
            call = found.group(0).strip()
            where = f"{source.name}:{number + 1}"
            above, statement = statement_of(source, number)
            marker = registry.take(number)
            if marker is None:
                if AT_ONCE.search(statement):
                    continue
                report(f"{where}: {call.strip('(')} can wait and has no '// wait' comment: {source.lines[number].strip()}")
                continue
            kind, text, _, _ = marker
            row = judge(kind, text, call, above, statement, where, report)
            if row:
                row[3] = values.annotate(row[3], source.name)
                rows.append(row)
    for kind, text, start, used in registry.by_end.values():
        if not used:
            report(f"{source.name}:{start + 1}: a '{kind}' comment without a call that waits: {text}")
    return rows


def judge(kind, text, call, above, statement, where, report):
    if kind not in KINDS:
        report(f"{where}: unknown kind '{kind}'; kinds: {', '.join(KINDS)}")
        return None
    fields = [field.strip() for field in text.split(";")]
    if len(fields) != KINDS[kind] or not all(fields):
        report(f"{where}: '{kind}' needs {KINDS[kind]} fields separated by ';', found {len(fields)}: {text}")
        return None
    call = call.strip(".->(").lstrip(":").strip(".->")
    if kind == "wait-none":
        return None
    if kind == "wait-idle":
        if not re.fullmatch(r"thread [A-Za-z/, -]+", fields[2]):
            report(f"{where}: the last field of wait-idle is 'thread NAME', found '{fields[2]}'")
        return [where, call, fields[0], "idle, no limit: " + fields[2], fields[1], kind]
    if kind in ("wait-brief", "wait-driver"):
        return [where, call, fields[0], "no time limit" if kind == "wait-brief" else "the driver's", fields[1], kind]
    if is_unlimited(call, statement):
        report(f"{where}: {call} has no time limit, but is marked as 'wait': {statement.strip()}")
        return None
    first = IDENTIFIER.match(fields[1])
    name = first.group(0).split(".")[-1] if first else ""
    if not name or not re.search(rf"\b{re.escape(name)}\b", above + statement):
        report(f"{where}: the limit '{fields[1]}' does not begin with a name that the call is given: {statement.strip()}")
        return None
    return [where, call, fields[0], fields[1], fields[2], kind]


def deadlines(source, values):
    """Every deadline and timer that is set."""
    setting = re.compile(r"Deadline::after\(|(?:loop_?|loop\(\)|calls_\.loop\(\))(?:\.|->)after\(")
    rows = []
    for number, code in enumerate(source.code):
        for found in setting.finditer(code):
            text = code[found.end():] + " " + " ".join(source.code[number + 1 : number + 3])
            depth, end = 1, 0
            for end, letter in enumerate(text):
                depth += letter in "([{"
                depth -= letter in ")]}"
                if depth == 0 or (depth == 1 and letter == "," and "after" in found.group(0) and "Deadline" not in found.group(0)):
                    break
            value = " ".join(text[:end].split())
            if "Duration delay" in value or "Duration duration" in value:
                continue
            kind = "deadline" if "Deadline" in found.group(0) else "timer"
            rows.append([f"{source.name}:{number + 1}", kind, values.annotate(value, source.name)])
    return rows


def show(header, rows, markdown):
    if markdown:
        print("| " + " | ".join(header) + " |")
        print("|" + "---|" * len(header))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    widths = [max(len(row[i]) for row in [header] + rows) for i in range(len(header))]
    for row in [header] + rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def main():
    options = {argument for argument in sys.argv[1:] if argument.startswith("--")}
    root = pathlib.Path([argument for argument in sys.argv[1:] if not argument.startswith("--")][0])
    paths = sorted(
        path
        for folder in FOLDERS
        if (root / folder).is_dir()
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES
    )
    if not paths:
        sys.exit(f"waits: no sources in {root}")
    sources = [Source(root, path) for path in paths]
    values = Values(sources)
    breaches = []
    rows = []
    for source in sources:
        rows += check(source, values, breaches.append)
    if "--idle-threads" in options:
        names = [row[3].split("thread ")[1] for row in rows if row[5] == "wait-idle"]
        print("\n".join(sorted({name.strip() for text in names for name in text.split(",")})))
        return
    if "--values" in options:
        for name, places in sorted(values.by_name.items()):
            for place, value in sorted(places.items()):
                print(f"{place}:{name} {value}")
        return
    if "--deadlines" in options:
        rows = [row for source in sources for row in deadlines(source, values)]
        show(["site", "what", "after"], rows, "--markdown" in options)
        return
    order = list(KINDS)
    rows.sort(key=lambda row: order.index(row[5]))
    show(["site", "call", "waits for", "at most", "ended earlier by"],
         [row[:5] for row in rows], "--markdown" in options)
    for breach in breaches:
        print(breach)
    counts = ", ".join(
        f"{sum(row[5] == kind for row in rows)} {label}"
        for kind, label in (("wait", "with a limit"), ("wait-idle", "idle"),
                            ("wait-brief", "brief"), ("wait-driver", "of the driver")))
    print(f"{len(rows)} waits: {counts}; {len(breaches)} breaches")
    sys.exit(bool(breaches))


main()
