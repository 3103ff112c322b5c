# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""Compares reports of `kvferry bench transfer --json` on simulated devices with the least shares of one large
memcpy that are allowed: python3 ratios.py REPORT.json... The best of the reports counts."""

import json
import sys

# A third of the medians on two processors with nothing else to do.
LEAST = {
    ("staged", "d2h"): 0.13,
    ("staged", "h2d"): 0.11,
    ("strided", "d2h"): 0.26,
    ("strided", "h2d"): 0.24,
    ("batch", "d2h"): 0.26,
    ("batch", "h2d"): 0.24,
    ("memcpy", "d2h"): 0.28,
    ("memcpy", "h2d"): 0.29,
    ("agent", "d2h"): 0.28,
    ("agent", "h2d"): 0.29,
}


def main():
    best = {}
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as report:
            results = json.load(report)["results"]
        for result in results:
            if result["path"] != "engine":
                continue
            key = (result["strategy"], result["direction"])
            best[key] = max(best.get(key, 0), result["share"])
    wrong = 0
    print("%-10s %-4s %8s %8s" % ("strategy", "", "share", "least"))
    for key, least in LEAST.items():
        share = best.get(key)
        if share is None or share < least:
            wrong += 1
        shown = "-" if share is None else "%.2f" % share
        print("%-10s %-4s %8s %8.2f%s" % (*key, shown, least, "" if share and share >= least else "  too slow"))
    return 1 if wrong else 0


sys.exit(main())
