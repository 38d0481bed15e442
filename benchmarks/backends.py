"""The same models over each backend, side by side: how long a step takes, as a ratio to Horovod's.

    python benchmarks/backends.py            # some minutes on two idle cores
    python benchmarks/backends.py --quick    # shows that it works, proves nothing

Each process is tied to a core of its own and computes with one thread. The processes of all backends are there all the
time, stopped but for those whose turn it is; the backends take turns, in an order that is drawn in each round, so what
disturbs the machine disturbs all. Absolute times depend on the machine and are not shown; a ratio of one run is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import contestants
import report
from contestants import Case
from report import Comparison
from step_overhead import (
    ONE_THREAD,
    RANKS,
    ROOT,
    ROUND_SECONDS,
    TIMES,
    cases,
    parsed,
    parser_of,
    pick_cores,
    progress,
    save,
    title,
    while_stopped,
)

from keras_dist.testing import WorkerPool

BEGIN, END = "<!-- backends benchmark: begin -->", "<!-- backends benchmark: end -->"
MEASURE = "horovod"
RIVALS = ("multi_worker", "mirrored")  # mirrored: one process, with a device and a thread for each core
SMALL, MIDDLE, CNN = contestants.MODELS
# Executions of a round are so many that it takes about half a second on an idle machine.
CASES = [Case(SMALL, 20, 6), Case(MIDDLE, 20, 1), Case(CNN, 20, 2), Case(SMALL, 1, 80), Case(MIDDLE, 1, 20)]


def main() -> None:
    args = parse()
    if not args.render:
        cores, load = pick_cores(), os.getloadavg()[0]
        os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2")
        comparisons: list[Comparison] = []
        for case in cases(CASES, args.quick):
            comparisons += compared(case, cores, args.rounds)
            save(in_order(comparisons), load, args.output)
    write(args.output, args.readme)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "runs/backends")
    parser.add_argument("--readme", action="store_true", help="write the README's table, too")
    args = parsed(parser)
    if args.readme and (args.quick or args.rounds < 15):
        parser.error("--readme needs the whole run: no --quick, 15 rounds or more.")
    return args


def compared(case: Case, cores: list[int], rounds: int) -> Iterator[Comparison]:
    """Times one model over all backends."""
    with progress(f"{title(case)}, {rounds} rounds"):
        times = timed(case, cores, rounds)
    for name in RIVALS:
        yield Comparison(group(name), title(case), times[name], times[MEASURE])


def group(name: str) -> str:
    return f"{RANKS} replicas: {name} over {MEASURE}"


def timed(case: Case, cores: list[int], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by backend. A round takes as long as on its slowest rank."""
    names, order = [MEASURE, *RIVALS], random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(WorkerPool(len(cores), name)) for name in names}
        for pool in pools.values():  # starts, traces and warms up; nobody is stopped: Gloo gives up after 30 s of that
            pool.run(contestants.time_backend, case, cores, timeout=ROUND_SECONDS)
        for _ in range(rounds):
            losses = {}
            for name in order.sample(names, len(names)):
                results = run(pools, name, case, cores)
                times[name].append(max(seconds for seconds, _ in results))
                losses[name] = results[0][1]
            contestants.check_alike(losses)
    return times


def run(pools: dict[str, WorkerPool], name: str, case: Case, cores: list[int]) -> list[Any]:
    """Runs one round of one backend while all others are stopped. Returns seconds and loss of each rank."""

    def one() -> list[Any]:
        return pools[name].run(contestants.time_backend, case, cores, timeout=ROUND_SECONDS)

    for other in (pool for key, pool in pools.items() if key != name):
        one = stopped(other, one)
    return one()


def stopped(pool: WorkerPool, function: Any) -> Any:
    return lambda: while_stopped(pool, function)


def in_order(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons of each backend behind one another."""
    return sorted(comparisons, key=lambda comparison: RIVALS.index(comparison.group.split()[2]))


def write(output: Path, to_readme: bool) -> None:
    """Makes the table of saved times, in their folder, and in the manual if asked to."""
    times = json.loads((output / TIMES).read_text())
    text = f"{report.table([Comparison(**each) for each in times['comparisons']])}\n\n{times['where']}"
    print(text)
    (output / "table.md").write_text(text + "\n")
    if to_readme:
        readme = ROOT / "README.md"
        readme.write_text(report.replaced(readme.read_text(), text, BEGIN, END))


if __name__ == "__main__":
    sys.exit(main())
