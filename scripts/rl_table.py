# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""A table of reports of `kvferry rl-loop`: python3 rl_table.py FOLDER [RUN...]

One line for each run, whose report is FOLDER/RUN.json, also when it left none; without names one for each
*.json in the folder. Sizes are MiB, spans over the iterations behind the third; times are medians in ms; a
cycle is all of them together, its p99 that of all iterations.
The slopes are the least-squares lines through what is reserved after each continue, and through the least
free memory of a device, over the iterations' numbers, in bytes per iteration.
"""

import glob
import json
import os
import sys

MIB = 1 << 20
WARM_UP = 3
TIMES = ("pause", "update", "clear", "reinit", "release", "resume", "continue")


def median(values):
    values = sorted(value for value in values if value is not None)
    return "%.1f" % values[len(values) // 2] if values else "-"


def p99(values):
    values = sorted(values)
    return "%.1f" % values[min(len(values) - 1, len(values) * 99 // 100)] if values else "-"


def cycle(iteration):
    """From the pause to the end of the continue, with the loads of weights, without the traffic between."""
    return sum(iteration[time + "_ms"] or 0 for time in TIMES)


def span(values):
    low, high = "%.0f" % (min(values) / MIB), "%.0f" % (max(values) / MIB)
    return low if low == high else low + "-" + high


def slope(numbers, values):
    count = len(values)
    if count < 2:
        return "-"
    middle = sum(numbers) / count
    mean = sum(values) / count
    rise = sum((number - middle) * (value - mean) for number, value in zip(numbers, values))
    return "%.0f" % (rise / sum((number - middle) ** 2 for number in numbers))


def row(name, report):
    done = [i for i in report["iterations"] if i["done"] and i["iteration"] > WARM_UP]
    if not done:
        return [name, str(len(report["iterations"])), str(len(report["failures"]))]

    def column(field):
        return [i[field] for i in done]

    return [
        name,
        str(len(report["iterations"])),
        str(len(report["failures"])),
        "%d/%d" % (report["corrupt"], report["verified"]),
        str(report["leaked_device_bytes"]),
        span(column("reserved_before")),
        span(column("reserved_after")),
        span(column("used_after")),
        slope(column("iteration"), column("reserved_after")),
        span(column("free_on_device_least")),
        slope(column("iteration"), column("free_on_device_least")),
        *(median(column(time + "_ms")) for time in TIMES),
        median(map(cycle, done)),
        p99(map(cycle, done)),
        p99([cycle(i) - (i["update_ms"] or 0) for i in done]),
        median([1000 * seconds for seconds in column("seconds")]),
        " ".join("%d/%d" % (graph["recordings"], graph["launches"]) for graph in report["graphs"]),
    ]


def main(folder, names):
    if not names:
        paths = sorted(glob.glob(os.path.join(folder, "*.json")))
        names = [os.path.basename(path)[: -len(".json")] for path in paths]
    rows = [
        ["run", "iter", "failed", "corrupt", "leaked", "reserved", "after", "used", "slope", "free", "slope"]
        + list(TIMES)
        + ["cycle", "p99", "p99 less update", "iteration", "graph"]
    ]
    failures = []
    for name in names:
        path = os.path.join(folder, name + ".json")
        try:
            with open(path, encoding="utf-8") as file:
                report = json.load(file)
        except (OSError, ValueError) as error:
            rows.append([name, "no report"])
            failures.append("%s: no report: %s" % (name, error))
            continue
        rows.append(row(name, report))
        failures += ["%s: %s" % (name, failure) for failure in report["failures"][:3]]
    widths = [max(len(cells[i]) for cells in rows if i < len(cells)) for i in range(len(rows[0]))]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip())
    print("\n".join(failures), end="\n" if failures else "")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
