"""The same models over each backend, side by side: how long a step takes, as a ratio to Horovod's.

    python benchmarks/backends.py            # some minutes on two idle cores
    python benchmarks/backends.py --quick    # shows only that it works

Each process is pinned to its own core and computes with one thread. The processes of all backends stay alive, and are
stopped while it is another backend's turn. The backends take turns in a random order, so what disturbs the machine
disturbs all. Absolute times depend on the machine and are not shown; ratios within one run are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import contestants
import report
from contestants import Case
from report import Comparison
from step_overhead import (
    ONE_THREAD,
    PAGE,
    RANKS,
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
Times = dict[str, list[float]]
RIVALS = ("multi_worker", "mirrored")  # mirrored: one process, with a device and a thread for each core
SMALL, MIDDLE, CNN, *_ = contestants.MODELS
# So many executions that a round takes about half a second on an idle machine.
CASES = [Case(SMALL, 20, 6), Case(MIDDLE, 20, 1), Case(CNN, 20, 2), Case(SMALL, 1, 80), Case(MIDDLE, 1, 20)]


def main() -> None:
    args = parse()
    measure(CASES, compared, in_order, args)
    write(args)


def measure(
    chosen: Sequence[Case],
    compared: Callable[[Case, list[int], int], Iterator[Comparison]],
    in_order: Callable[[list[Comparison]], list[Comparison]],
    args: argparse.Namespace,
) -> None:
    """Compares each case on pinned cores, and saves what is there after each; nothing if it is only to be shown."""
    if args.render:
        return
    cores, load = pick_cores(), os.getloadavg()[0]
    os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2")
    comparisons: list[Comparison] = []
    for case in cases(chosen, args.quick):
        comparisons += compared(case, cores, args.rounds)
        save(in_order(comparisons), load, args.output)


def parse(description: str | None = __doc__, output: str = "runs/backends") -> argparse.Namespace:
    parser = parser_of(description, output)
    args = parsed(parser)
    if args.docs and (args.quick or args.rounds < 15):
        parser.error("--docs needs the whole run: no --quick, 15 rounds or more.")
    return args


def compared(case: Case, cores: list[int], rounds: int) -> Iterator[Comparison]:
    """Times one model over all backends."""
    with progress(f"{title(case)}, {rounds} rounds"):
        times = timed(case, cores, rounds)
    for name in RIVALS:
        yield Comparison(group(name), title(case), times[name], times[MEASURE])


def group(name: str) -> str:
    return f"{RANKS} replicas: {name} over {MEASURE}"


def timed(case: Case, cores: list[int], rounds: int) -> Times:
    """Returns the seconds of each round, by backend."""
    with contextlib.ExitStack() as stack:
        names = [MEASURE, *RIVALS]
        pools = {name: (stack.enter_context(WorkerPool(len(cores), name)), cores) for name in names}
        return take_turns(pools, case, rounds)


def take_turns(pools: Mapping[str, tuple[WorkerPool, list[int]]], case: Case, rounds: int) -> Times:
    """Returns the seconds of each round, by contestant. A round takes as long as on its slowest rank.

    Args:
        pools: The processes of each contestant, and the cores that they may use.
        case: What they train.
        rounds: How often.
    """
    names, order = list(pools), random.Random(0)
    times: Times = {name: [] for name in names}
    for pool, cores in pools.values():  # starts, traces, warms up; none is stopped: Gloo gives up after 30 s
        pool.run(contestants.time_backend, case, cores, timeout=ROUND_SECONDS)
    for _ in range(rounds):
        losses = {}
        for name in order.sample(names, len(names)):
            results = run(pools, name, case)
            times[name].append(max(seconds for seconds, _ in results))
            losses[name] = results[0][1]
        contestants.check_alike(losses)
    return times


def run(pools: Mapping[str, tuple[WorkerPool, list[int]]], name: str, case: Case) -> list[Any]:
    """Runs one round of one contestant while all others are stopped. Returns seconds and loss of each rank."""

    def one() -> list[Any]:
        pool, cores = pools[name]
        return pool.run(contestants.time_backend, case, cores, timeout=ROUND_SECONDS)

    for other in (pool for key, (pool, _) in pools.items() if key != name):
        one = stopped(other, one)
    return one()


def stopped(pool: WorkerPool, function: Any) -> Any:
    return lambda: while_stopped(pool, function)


def in_order(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Returns the comparisons, grouped by backend."""
    return sorted(comparisons, key=lambda comparison: RIVALS.index(comparison.group.split()[2]))


def write(args: argparse.Namespace, begin: str = BEGIN, end: str = END) -> None:
    """Makes the table of saved times, in their folder, and in docs/ if asked to."""
    times = json.loads((args.output / TIMES).read_text())
    text = f"{report.table([Comparison(**each) for each in times['comparisons']])}\n\n{times['where']}"
    print(text)
    (args.output / "table.md").write_text(text + "\n")
    if args.docs:
        PAGE.write_text(report.replaced(PAGE.read_text(), text, begin, end))


if __name__ == "__main__":
    sys.exit(main())
