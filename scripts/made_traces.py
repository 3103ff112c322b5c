# SPDX-FileCopyrightText: The kvferry authors
# SPDX-License-Identifier: Apache-2.0
"""Made-up traces to try eviction on: python3 made_traces.py SEED FOLDER

Writes ten files for `kvferry simulate --trace`, of 2,500 to 4,000 requests each: short ones, in which a policy
has to do well before it has seen much. Another seed makes other traces of the same kinds.
"""

import json
import os
import random
import sys


class Ids:
    def __init__(self):
        self.next = 0

    def take(self, count):
        self.next += count
        return list(range(self.next - count, self.next))


def documents(rnd, requests, count, blocks, question, skew):
    """Questions about documents, some of which are asked about more often."""
    ids = Ids()
    of = [ids.take(max(1, int(rnd.lognormvariate(0, 0.6) * blocks))) for _ in range(count)]
    weights = [1 / (i + 1) ** skew for i in range(count)]
    return [rnd.choices(of, weights)[0] + ids.take(1 + rnd.randrange(question)) for _ in range(requests)]


def chats(rnd, requests, prompts, prompt_blocks, turn_blocks, turns, live):
    """Sessions behind a few system prompts, so many at a time; the newest ones are the most active."""
    ids = Ids()
    of = [ids.take(int(rnd.expovariate(1 / prompt_blocks)) + 1) for _ in range(prompts)]
    weights = [1 / (i + 1) for i in range(prompts)]
    active, made = [], []
    while len(made) < requests:
        while len(active) < live:
            active.append([list(rnd.choices(of, weights)[0]), 1 + int(rnd.expovariate(1 / turns))])
        at = rnd.randrange(len(active)) if rnd.random() < 0.7 else len(active) - 1
        active[at][0] = active[at][0] + ids.take(1 + int(rnd.expovariate(1 / turn_blocks)))
        made.append(active[at][0])
        active[at][1] -= 1
        if active[at][1] <= 0:
            active.pop(at)
    return made


def agents(rnd, requests, kinds, tools_blocks, steps, seen, live):
    """Agents that call again and again with what they have seen since; a few of them are far more active."""
    ids = Ids()
    of = [ids.take(tools_blocks) for _ in range(kinds)]
    active, made = [], []
    while len(made) < requests:
        while len(active) < live:
            active.append([rnd.choice(of) + ids.take(1 + rnd.randrange(4)), 2 + rnd.randrange(steps)])
        at = min(int(rnd.expovariate(1 / 2)), len(active) - 1)
        made.append(active[at][0])
        active[at][0] = active[at][0] + ids.take(1 + rnd.randrange(seen))
        active[at][1] -= 1
        if active[at][1] <= 0:
            active.pop(at)
    return made


def readings(rnd, requests, blocks, questions, live):
    """Long documents, each asked about for a while and never again."""
    ids = Ids()
    active, made = [], []
    while len(made) < requests:
        while len(active) < live:
            active.append([ids.take(max(2, int(rnd.lognormvariate(0, 0.5) * blocks))),
                           1 + rnd.randrange(2 * questions)])
        at = rnd.randrange(len(active))
        made.append(active[at][0] + ids.take(1))
        active[at][1] -= 1
        if active[at][1] <= 0:
            active.pop(at)
    return made


def renumbered(parts):
    first, made = 0, []
    for part in parts:
        made.append([[block + first for block in request] for request in part])
        first += max(max(request) for request in part) + 1
    return made


def mixed(rnd, *parts):
    left, made = [list(part) for part in renumbered(parts)], []
    while any(left):
        made.append(rnd.choices(left, [len(part) for part in left])[0].pop(0))
    return made


def in_turn(*parts):
    return [request for part in renumbered(parts) for request in part]


def traces(seed):
    def rnd(number):
        return random.Random(seed * 100 + number)

    return {
        "documents": documents(rnd(1), 3000, 300, 30, 3, 0.8),
        "documents-flat": documents(rnd(2), 3000, 600, 25, 3, 0.4),
        "chats": chats(rnd(3), 4000, 3, 6, 3, 5, 60),
        "chats-long": chats(rnd(4), 3000, 20, 4, 6, 8, 200),
        "agents": agents(rnd(5), 4000, 6, 8, 12, 4, 40),
        "readings": readings(rnd(6), 2500, 50, 8, 60),
        "readings-few": readings(rnd(7), 2500, 60, 4, 15),
        "mix": mixed(rnd(8), documents(rnd(9), 1200, 150, 30, 3, 0.8), chats(rnd(10), 1500, 3, 5, 3, 5, 40),
                     readings(rnd(11), 1000, 50, 6, 30)),
        "mix-agents": mixed(rnd(12), agents(rnd(13), 1500, 5, 8, 10, 4, 30), readings(rnd(14), 800, 60, 8, 30),
                            chats(rnd(15), 1500, 1, 2, 2, 3, 50)),
        "phases": in_turn(chats(rnd(16), 1300, 3, 6, 3, 5, 60), documents(rnd(17), 1200, 200, 30, 3, 0.8),
                          agents(rnd(18), 1300, 6, 8, 10, 4, 30)),
    }


def main(seed, folder):
    os.makedirs(folder, exist_ok=True)
    for name, requests in traces(seed).items():
        with open(os.path.join(folder, name + ".jsonl"), "w") as file:
            for number, blocks in enumerate(requests):
                print(json.dumps({"timestamp": number, "input_length": 512 * len(blocks), "output_length": 1,
                                  "hash_ids": blocks}), file=file)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(int(sys.argv[1]), sys.argv[2])
