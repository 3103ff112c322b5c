# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""What the host tier does, from a built command: policies, hits with data, deaths, long contexts, its index.

    python3 host_tier.py --program build/release/cli/kvferry [--device cuda:0] [--trace FILE] [--only PART,...]

simulate: hit rates of all policies, and their plot. data: a replay, one request after the other, beside the
simulation of the same capacity (by lru they are equal). deaths: a replay whose manager and then mover are killed
half-way: hits before and after. longctx: outputs of sequences four times the device, beside an arena that holds them.
index: looks, and a manager that takes over a pool. churn (only when asked for): 500,000 requests on a full pool, whose
memory stands still. Reports and plots go to --out. Fails when a block was corrupt, anything leaked, an output differs,
or what was in host memory is not found again. Works on a machine that has only a driver.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PARTS = ["simulate", "data", "deaths", "longctx", "index", "churn"]
POLICIES = ["reuse", "lru", "arc", "s3fifo", "sieve", "lfu"]
# Hit rate, by lru. Of the others the device's cache is no part of what the host's would be, so that both together find
# more or less than one; see docs/performance.md.
MOST_DIFFERENCE = 0.001
# Made up for the replay with deaths: a GPU has done fewer before its next manager has looked at all that was kept.
DEATH_REQUESTS = 12000
MIB = 1 << 20


class Failed(Exception):
    pass


class Check:
    def __init__(self, options):
        self.options = options
        self.rows = []
        self.on_gpu = options.device != "host"
        # Host memory of so many blocks, for which the device is too small.
        self.geometry = ["--geometry", "llama-3-8b"] if self.on_gpu else []
        self.block = 2 * MIB if self.on_gpu else 32 * 1024

    def path(self, name):
        return os.path.join(self.options.out, name)

    def kvferry(self, *arguments, name):
        done = subprocess.run([self.options.program, *arguments], capture_output=True, text=True)
        with open(self.path(name + ".log"), "w") as log:
            log.write(done.stderr)
        if done.returncode:
            raise Failed("kvferry %s: exit code %d: %s" % (" ".join(arguments), done.returncode, done.stderr[-600:]))
        return done.stdout

    def trace(self):
        return ["--trace", self.options.trace] if self.options.trace else []

    def gpu_blocks(self):
        return ["--gpu-blocks", str(self.options.gpu_blocks)]

    def tell(self, part, text):
        self.rows.append("%-9s %s" % (part, text))
        print(self.rows[-1], flush=True)

    def simulate(self):
        plot = self.path("simulate.svg")
        text = self.kvferry("simulate", *self.trace(), "--plot", plot, "--json", name="simulate")
        with open(self.path("simulate.json"), "w") as file:
            file.write(text)
        told = json.loads(text)
        rates = {}
        for one in told["results"]:
            if one["hit_rate"] > told["unlimited_hit_rate"]:
                raise Failed("%s finds %.4f with %d blocks, more than the %.4f that there is to find" % (
                    one["policy"], one["hit_rate"], one["capacity"], told["unlimited_hit_rate"]))
            rates.setdefault(one["capacity"], {})[one["policy"]] = one["hit_rate"]
        names = POLICIES + ["optimal"]
        self.tell("simulate", "%9s " % "capacity" + " ".join("%7s" % name for name in names))
        for capacity, of in sorted(rates.items()):
            self.tell("simulate", "%9d " % capacity + " ".join("%7.4f" % of[name] for name in names))
        self.tell("simulate", "plot " + plot)

    def replay(self, name, *arguments, **more):
        report = self.path(name + ".json")
        command = ["replay", "--device", self.options.device, *self.geometry, *self.trace(), "--report", report]
        run = more.get("run") or (lambda all: self.kvferry(*all, name=name))
        run([*command, *arguments])
        with open(report) as file:
            told = json.load(file)
        for field in ("blocks_corrupt", "leaked_device_bytes", "leaked_host_bytes", "leftover_names"):
            if told[field]:
                raise Failed("%s: %s is %s, not 0; see %s" % (name, field, told[field], report))
        return told

    def data(self):
        requests = ["--requests", str(self.options.requests)] if self.options.requests else []
        for policy in self.options.policies.split(","):
            told = self.replay(
                "data-" + policy, *requests, "--in-flight", "1", *self.gpu_blocks(), "--host-memory",
                str(self.options.blocks * self.block), "--eviction-policy", policy)
            capacity = self.options.blocks
            text = self.kvferry("simulate", *self.trace(), *requests, "--capacity", str(capacity), "--policy", policy,
                                "--json", name="data-simulate")
            rate = json.loads(text)["results"][0]["hit_rate"]
            self.tell("data", "%-7s host memory for %d blocks: %.4f with data, %d blocks compared, 0 corrupt; %.4f simulated" % (
                policy, capacity, told["hit_rate"], told["blocks_verified"], rate))
            if policy == "lru" and abs(told["hit_rate"] - rate) > MOST_DIFFERENCE:
                raise Failed("lru finds %.4f with data and %.4f simulated: more than %.3f apart" % (
                    told["hit_rate"], rate, MOST_DIFFERENCE))

    def deaths(self):
        killed = []

        def run(command):
            with tempfile.TemporaryDirectory(prefix="kvferry-tier.") as folder, open(self.path("deaths.log"), "w") as log:
                at = subprocess.Popen([self.options.program, *command, "--runtime-dir", folder], stdout=log, stderr=log)
                try:
                    for victim in ("manager", "mover"):
                        killed.append((victim, self.kill(at, folder, victim, killed)))
                    if at.wait(timeout=600):
                        raise Failed("replay with deaths: exit code %d; see %s" % (at.returncode, log.name))
                finally:
                    if at.poll() is None:
                        at.terminate()
                        at.wait()

        options = self.options.death_options.split()
        if not self.options.trace and "--requests" not in options:
            options += ["--requests", str(DEATH_REQUESTS)]
        told = self.replay("deaths", "--verify", "full", *self.gpu_blocks(), "--host-memory",
                           str(10 * self.options.blocks * self.block), *options, run=run)
        if len(told["deaths"]) != 2:
            raise Failed("deaths: the replay saw %d deaths, not 2" % len(told["deaths"]))
        spans = [told["deaths"][0]["before"], told["deaths"][0]["after"], told["deaths"][1]["after"]]
        for name, span in zip(("before any", "after the manager's", "after the mover's"), spans):
            found = span["hits_device"] + span["hits_host"]
            if not span["hits_host"]:
                raise Failed("deaths: nothing was found in host memory " + name)
            self.tell("deaths", "%-20s %6d requests, %.4f found, %.4f in host memory" % (
                name, span["requests"], found / span["block_references"], span["hits_host"] / span["block_references"]))
        self.tell("deaths", "%d blocks compared, 0 corrupt; %d jobs failed; the next manager adopted %d of %d blocks" % (
            told["blocks_verified"], told["failed_jobs"], self.kept["adopted"], self.kept["found"]))

    # Kills it once the present manager has answered some jobs, and waits for the next one of it.
    def kill(self, replay, folder, victim, killed):
        def pid_of(status):
            return status["pid"] if victim == "manager" else status["engines"][0]["ranks"][0]["mover"]["pid"]

        self.wait_for(replay, folder, lambda status: status["engines"][0]["jobs"]["done"] >= self.options.kill_after)
        before = pid_of(self.status(folder))
        os.kill(before, signal.SIGKILL)

        def is_back(status):
            kept = status["pool"]["kept"]
            if victim == "manager" and not (kept and kept["adopted"] + kept["dropped"] == kept["found"]):
                return False
            self.kept = kept
            return pid_of(status) not in (0, before) and status["engines"][0]["offload_ready"]

        self.wait_for(replay, folder, is_back)
        return before

    def status(self, folder):
        told = [os.path.join(folder, name) for name in os.listdir(folder)]
        if not told:
            return None
        done = subprocess.run([self.options.program, "status", "--instance", "replay", "--runtime-dir", told[0], "--json"],
                              capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def wait_for(self, replay, folder, holds):
        until = time.monotonic() + 120
        while time.monotonic() < until:
            if replay.poll():
                raise Failed("replay with deaths: exit code %d before its processes were killed; see %s" % (
                    replay.returncode, self.path("deaths.log")))
            if replay.returncode == 0:
                raise Failed("deaths: the replay ended before its processes were killed: give it more requests")
            status = self.status(folder)
            engine = status["engines"][0] if status and status["engines"] else None
            if engine and engine["ranks"] and engine["ranks"][0]["mover"] and holds(status):
                return
            threading.Event().wait(0.1)
        raise Failed("deaths: what it waits for did not come within 120 s: %s" % (status,))

    def longctx(self):
        sizes = self.options.longctx.split() if self.options.longctx else (
            ["--context", "16384", "--sequences", "16", "--gpu-blocks", "4112"] if self.on_gpu else [])
        for arena in ("layer-first", "block-first"):
            text = self.kvferry("longctx", "--device", self.options.device, *self.geometry, *sizes, "--arena", arena, "--json",
                                name="longctx-" + arena)
            with open(self.path("longctx-%s.json" % arena), "w") as file:
                file.write(text)
            told = json.loads(text)
            if not told["outputs_equal"]:
                raise Failed("longctx, %s: outputs equal: %s; see %s" % (
                    arena, told["outputs_equal"], self.path("longctx-%s.json" % arena)))
            without = told["without_lookahead"]
            bound = "no bound is known of simulated devices" if told["bound_s"] is None else "all of it can be hidden" if (
                not told["waiting_over_bound"]) else (
                "waiting %.2f s of a bound of %.2f, %.2f; without look-ahead %.2f s" % (
                    told["waiting_s"], told["bound_s"], told["waiting_over_bound"], without["waiting_s"]))
            self.tell("longctx", "%-11s %.1f times the device, outputs equal: %s; tokens/s %.0f, %.0f without look-ahead, %s with room for all; "
                      "waiting %.1f %% (%.1f %%); %s" % (
                          arena, told["oversubscription"], told["outputs_equal"], told["tokens_per_s"], without["tokens_per_s"],
                          "%.0f" % told["tokens_per_s_no_swap"] if told["tokens_per_s_no_swap"] else "-",
                          100 * told["waiting_share"], 100 * without["waiting_share"], bound))

    def index(self):
        text = self.kvferry("bench", "lookup", "restart", "--device", "host", "--entries", str(self.options.entries),
                            "--repeats", "3", "--json", name="index")
        with open(self.path("index.json"), "w") as file:
            file.write(text)
        for one in json.loads(text)["results"]:
            self.tell("index", "%d blocks: %-8s %-24s %10.1f us, p99 %.1f" % (
                self.options.entries, one["bench"], one["strategy"] or one["path"], one["us"], one["us_p99"]))

    def churn(self):
        told = self.replay("churn", "--requests", str(self.options.churn), "--seed", "7", *self.gpu_blocks(), "--host-memory",
                           str(10016 * self.block))
        samples = [one for one in told["samples"] if one["requests"] >= self.options.churn / 5]
        at = [one["requests"] for one in samples]
        for name in samples[0]["anonymous_kib"]:
            kib = [one["anonymous_kib"][name] for one in samples]
            # A moment of want leaves a step, and no slope.
            slopes = [1024 * (kib[i + 1] - kib[i]) / (at[i + 1] - at[i]) for i in range(len(at) - 1)]
            self.tell("churn", "%-9s %8d to %d KiB of anonymous memory from request %d on; median of slopes %.3f bytes a request" % (
                name, kib[0], kib[-1], at[0], statistics.median(slopes)))
        last = samples[-1]["pool"]
        self.tell("churn", "pool: %d slabs, then %d; %d bytes free, %d of them in slabs that are in use; %.2f blocks in a row" % (
            samples[0]["pool"]["slabs"], last["slabs"], last["free"], last["free_in_slabs"],
            last["placed_blocks"] / last["placed_extents"]))
        self.tell("churn", "%d requests, %.4f found, %d blocks compared, 0 corrupt" % (
            told["requests"], told["hit_rate"], told["blocks_verified"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, help="the built command")
    parser.add_argument("--device", default="host", help="as for kvferry replay")
    parser.add_argument("--trace", help="what to play (default: made-up requests)")
    parser.add_argument("--requests", type=int, help="how much of it for data (default: all)")
    parser.add_argument("--blocks", type=int, default=3008, help="that host memory holds, for data; ten times as many for deaths")
    parser.add_argument("--gpu-blocks", type=int, default=600, help="of the device, for data, deaths and churn")
    parser.add_argument("--policies", default="reuse,lru", help="for data")
    parser.add_argument("--kill-after", type=int, default=1500, help="jobs that a manager has answered")
    parser.add_argument("--death-options", default="", help="more for the replay with deaths, such as --requests (default without a trace: %d)" % DEATH_REQUESTS)
    parser.add_argument("--longctx", help="sizes of kvferry longctx (default: four times the device; of a GPU 32 GiB on 8)")
    parser.add_argument("--entries", type=int, default=1000000, help="of the index")
    parser.add_argument("--churn", type=int, default=500000, help="requests")
    parser.add_argument("--only", default=",".join(PARTS[:-1]), help="some of " + ", ".join(PARTS))
    parser.add_argument("--out", help="reports and plots (default: a new folder)")
    options = parser.parse_args()
    options.out = options.out or tempfile.mkdtemp(prefix="kvferry-host-tier.")
    os.makedirs(options.out, exist_ok=True)
    check = Check(options)
    failed = 0
    for part in options.only.split(","):
        if part not in PARTS:
            parser.error("--only %s: it has to be one of %s" % (part, ", ".join(PARTS)))
        try:
            getattr(check, part)()
        except (Failed, subprocess.TimeoutExpired) as error:
            failed += 1
            check.tell(part, "FAILED: %s" % error)
    print("%s; reports in %s" % ("%d parts failed" % failed if failed else "all of it holds", options.out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
