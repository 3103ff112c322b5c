# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""What copies do to the memory of a GPU, by its hardware counters; see gpu_counters.sh.

    python3 gpu_counters.py load PROGRAM    under ncu: a kernel that lives by device memory, while PROGRAM copies
    python3 gpu_counters.py report FOLDER   the tables of FOLDER/load.csv and FOLDER/{gather,scatter}.csv
"""

import csv
import os
import signal
import statistics
import subprocess
import sys
import time

KERNELS = 24  # Of each way: each reads 1 GiB.
STARTS_WITHIN = 4.5  # Seconds until an instance copies.
CHUNKED = {
    "direct, block-first": ["--arena", "block-first", "--chunk-size", "32KiB", "--strategy", "direct"],
    "rows of 32 KiB": ["--chunk-size", "32KiB", "--strategy", "strided"],
    "rows of 16 KiB": ["--chunk-size", "16KiB", "--strategy", "strided"],
}
WAYS = [("nothing", None, [])] + [
    (name, way, options) for way in ("d2h", "h2d") for name, options in CHUNKED.items()
]
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}


def load(program):
    import torch

    weights = torch.ones(1 << 28, device="cuda")
    weights.sum()
    torch.cuda.synchronize()
    for name, way, options in WAYS:
        copies = None
        if way:
            command = [program, "bench", "transfer", "--no-bare", "--repeats", "1", "--bytes", "200GiB"]
            copies = subprocess.Popen(
                command + ["--blocks", "64", "--direction", way] + options,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
            time.sleep(STARTS_WITHIN)
            if copies.poll() is not None:
                sys.exit("the benchmark ended before its copies were looked at: %s" % name)
        torch.cuda.nvtx.range_push("%s %s" % (way or "", name))
        for _ in range(KERNELS):
            weights.sum()
            torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        if copies:
            os.killpg(copies.pid, signal.SIGINT)
            try:
                copies.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(copies.pid, signal.SIGKILL)
                sys.exit("the benchmark did not end within 30 s: %s" % name)


def kernels(path):
    """Of each kernel its values, in bytes and seconds, in the order in which they ran."""
    with open(path) as file:
        rows = list(csv.reader(line for line in file if line.startswith('"')))
    found = {}
    for row in rows[1:]:
        entry = dict(zip(rows[0], row))
        values = found.setdefault(entry["ID"], {"name": entry["Kernel Name"]})
        text = entry["Metric Value"].replace(",", "")
        values[entry["Metric Name"]] = float(text) * UNITS.get(entry["Metric Unit"], 1)
    return list(found.values())


def rate(of, metric):
    return statistics.median(k[metric] / k["gpu__time_duration.sum"] / 1e9 for k in of)


def report(folder):
    large = [k for k in kernels(os.path.join(folder, "load.csv")) if k["dram__bytes_read.sum"] > 5e8]
    large = large[len(large) - KERNELS * len(WAYS):]  # Without the one that warms up.
    print("a kernel that reads 1 GiB of device memory, medians of %d, GB/s by the device's counters" % KERNELS)
    print("%-26s %9s %10s %10s %10s %10s" % ("beside", "us", "mem read", "mem write", "bus read", "bus write"))
    for i, (name, way, _) in enumerate(WAYS):
        of = large[i * KERNELS:(i + 1) * KERNELS]
        us = statistics.median(k["gpu__time_duration.sum"] for k in of) * 1e6
        metrics = ["dram__bytes_read.sum", "dram__bytes_write.sum", "pcie__read_bytes.sum", "pcie__write_bytes.sum"]
        print("%-26s %9.1f %10.1f %10.1f %10.2f %10.2f" %
              (("%s %s" % (way or "", name)).strip(), us, *(rate(of, m) for m in metrics)))
    print("\nkernels of the ring, medians: MB of device memory and of the cache, for a slot of 8 MiB")
    for kind in ("gather", "scatter"):
        of = kernels(os.path.join(folder, kind + ".csv"))
        fields = ["dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"]
        read, written, cached = (statistics.median(k[f] for k in of) / 1e6 for f in fields)
        us = statistics.median(k["gpu__time_duration.sum"] for k in of) * 1e6
        print("%-8s read %.2f, written %.2f, cache %.2f, %.1f us, %d thread blocks" %
              (kind, read, written, cached, us, of[0]["launch__grid_size"]))


if __name__ == "__main__":
    {"load": load, "report": report}[sys.argv[1]](sys.argv[2])
