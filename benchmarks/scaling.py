"""When two processes pay: the time of a step with two over that with one, on the same global batches.

    python benchmarks/scaling.py            # some minutes on two idle cores
    python benchmarks/scaling.py --quick    # shows only that it works

The model is that of examples/digits.py. Each of the two processes has one core and one thread. They are compared with
one process on one core, and with one process that computes on both cores, as plain
TensorFlow does. The contestants take turns in a random order; the others are stopped meanwhile.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from backends import Times, measure, parse, take_turns, write
from contestants import Case
from report import Comparison
from step_overhead import RANKS, progress

from keras_dist.testing import WorkerPool

BEGIN, END = "<!-- scaling benchmark: begin -->", "<!-- scaling benchmark: end -->"
TWO_PROCESSES = "two processes"
RIVALS = {"one process on one core": 1, "one process on both cores": RANKS}
SMALL, LARGE = "digits, 8 x 8", "digits, 28 x 28"
# So many executions that a round takes about half a second on an idle machine.
CASES = [Case(SMALL, 1, 80, 32), Case(SMALL, 1, 30, 256), Case(LARGE, 1, 10, 64), Case(LARGE, 1, 3, 256)]


def main() -> None:
    args = parse(__doc__, "runs/scaling")
    measure(CASES, compared, in_order, args)
    write(args, BEGIN, END)


def compared(case: Case, cores: list[int], rounds: int) -> Iterator[Comparison]:
    """Times one model and batch size with every contestant."""
    with progress(f"{title(case)}, {rounds} rounds"):
        times = timed(case, cores, rounds)
    for rival in RIVALS:
        yield Comparison(f"2 processes over {rival}", title(case), times[TWO_PROCESSES], times[rival])


def title(case: Case) -> str:
    side = case.model.split()[-1]
    return f"{side} × {side} pixels, batches of {case.batch}"


def timed(case: Case, cores: list[int], rounds: int) -> Times:
    """Returns the seconds of each round, by contestant."""
    with contextlib.ExitStack() as stack:
        pools = {TWO_PROCESSES: (stack.enter_context(WorkerPool(RANKS, "horovod")), cores)}
        for name, count in RIVALS.items():
            pools[name] = stack.enter_context(WorkerPool(1, "serial")), cores[:count]
        return take_turns(pools, case, rounds)


def in_order(comparisons: list[Comparison]) -> list[Comparison]:
    """Returns the comparisons with each rival together."""
    return sorted(comparisons, key=lambda comparison: [name in comparison.group for name in RIVALS], reverse=True)


if __name__ == "__main__":
    sys.exit(main())
