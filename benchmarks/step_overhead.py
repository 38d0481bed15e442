"""What a distributed step costs beyond the work itself, as ratios of times that are measured side by side.

    python benchmarks/step_overhead.py            # some minutes on two idle cores
    python benchmarks/step_overhead.py --quick    # about two minutes: shows only that it works

Three comparisons: `fit` in serial over plain Keras; `fit` on 2 processes over a hand-written Horovod loop; the
all-reduce of a step over TensorFlow's RING. Each process is pinned to its own core and computes with one
thread. The rivals take turns in a random order, so what disturbs the machine disturbs both. Absolute times depend on
the machine and are not shown; ratios within one run are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import contestants
import report
from contestants import Case
from report import Comparison

from keras_dist.testing import WorkerPool

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = "images/step_overhead.png"  # beside the page
TIMES = "times.json"
RANKS = 2
ROUNDS_A_START = 8  # then the processes are restarted, because their memory layout matters too
ROUND_SECONDS = 600.0
SMALL, MIDDLE, CNN, *_ = contestants.MODELS
# So many executions that a round takes about half a second on an idle machine.
SERIAL = [Case(SMALL, 20, 10), Case(SMALL, 1, 200), Case(CNN, 1, 50)]
HOROVOD = [Case(SMALL, 20, 6), Case(MIDDLE, 20, 1), Case(CNN, 20, 2)]
HOROVOD += [Case(SMALL, 1, 80), Case(MIDDLE, 1, 20), Case(CNN, 1, 30)]
ALL_REDUCE = {1: 40, 25: 4, 100: 2}  # megabytes: how many of them are a round
SERIAL_GOAL, HOROVOD_GOAL, HOROVOD_GOAL_AT = 1.01, 1.05, 20
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


def main() -> None:
    args = parse()
    if not args.render:
        cores = pick_cores()
        os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2")
        parts = {"serial": serial, "horovod": horovod, "all-reduce": all_reduce}
        comparisons, load = [], os.getloadavg()[0]
        for name in args.only or parts:
            for comparison in parts[name](cores, args.rounds, args.quick):
                comparisons.append(comparison)
                save(comparisons, load, args.output)
    write(args.output, args.docs)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "runs/step_overhead")
    parser.add_argument("--only", action="append", choices=["serial", "horovod", "all-reduce"], help="can be repeated")
    args = parsed(parser)
    if args.docs and (args.quick or args.only or args.rounds < 15):
        parser.error("--docs needs the whole run: no --quick, no --only, 15 rounds or more.")
    return args


def parser_of(description: str | None, output: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="of each case (default: 15, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: not to be quoted")
    parser.add_argument("--output", type=Path, default=output, help="folder (default: %(default)s)")
    parser.add_argument("--render", action="store_true", help="show an earlier run's times again")
    parser.add_argument("--docs", action="store_true", help="also write the tables and plots in docs/")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, with the number of rounds."""
    args = parser.parse_args()
    if args.rounds is None:
        args.rounds = 3 if args.quick else 15
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more. Received: {args.rounds}")
    return args


def pick_cores() -> list[int]:
    """Returns a core for each rank, and restricts this process and its children to these cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < RANKS:
        sys.exit(f"This needs {RANKS} cores, one for each process. Received: {len(allowed)}")
    os.sched_setaffinity(0, allowed[:RANKS])
    return allowed[:RANKS]


# --- Comparisons ---


def serial(cores: list[int], rounds: int, quick: bool) -> Iterator[Comparison]:
    """`fit` in one process, after `kd.distribute` and without."""
    for case in cases(SERIAL, quick):
        times = in_blocks(contestants.time_serial, case, "serial", cores[:1], rounds)
        yield Comparison("One process: fit over plain Keras", title(case), *pair(times, "plain"), SERIAL_GOAL)


def horovod(cores: list[int], rounds: int, quick: bool) -> Iterator[Comparison]:
    """`fit` on two processes, and a hand-written loop on the same ones."""
    for case in cases(HOROVOD, quick):
        times = in_blocks(contestants.time_horovod, case, "horovod", cores, rounds)
        goal = HOROVOD_GOAL if case.steps_per_execution == HOROVOD_GOAL_AT else None
        group = "2 processes: fit over a hand-written Horovod loop"
        yield Comparison(group, title(case), *pair(times, "hand-written"), goal)


def cases(of: list[Case], quick: bool) -> list[Case]:
    if not quick:
        return of
    return [replace(case, executions=max(1, case.executions // 10)) for case in of]


def title(case: Case) -> str:
    count = case.steps_per_execution
    return f"{case.model}, {count} step{'s' * (count > 1)} an execution"


def pair(times: list[contestants.Seconds], rival: str) -> tuple[list[float], list[float]]:
    """Returns the rounds of ours and of the rival. A round takes as long as on its slowest rank."""
    ours, theirs = (
        [max(ranks) for ranks in zip(*(each[name] for each in times), strict=True)] for name in ("ours", rival)
    )
    return ours, theirs


def in_blocks(
    timed: Callable[..., contestants.Seconds], case: Case, backend: str, cores: list[int], rounds: int
) -> list[contestants.Seconds]:
    """Runs the rounds of one comparison and restarts the processes now and then. Returns times by rank."""
    blocks = math.ceil(rounds / ROUNDS_A_START)
    times: list[contestants.Seconds] = [{} for _ in cores]
    for block in range(blocks):
        count = len(range(block, rounds, blocks))
        with progress(f"{backend}: {title(case)}, {count} of {rounds} rounds"), WorkerPool(len(cores), backend) as pool:
            new = pool.run(timed, case, count, block, cores, timeout=ROUND_SECONDS)
        for rank, rounds_by_name in enumerate(new):
            for name, seconds in rounds_by_name.items():
                times[rank].setdefault(name, []).extend(seconds)
    return times


def all_reduce(cores: list[int], rounds: int, quick: bool) -> Iterator[Comparison]:
    """The sum over the ranks in a step, and that of a MultiWorkerMirroredStrategy with RING."""
    sums = {megabytes: 1 if quick else times for megabytes, times in ALL_REDUCE.items()}
    ours, theirs = ({megabytes: [] for megabytes in sums} for _ in range(2))
    order = random.Random(0)
    with WorkerPool(len(cores), "horovod") as pool, Ring(cores) as ring:
        run = {
            "ours": lambda *args: (pool.run(contestants.time_all_reduce, *args, cores, timeout=ROUND_SECONDS), ours),
            "ring": lambda *args: (while_stopped(pool, lambda: ring.run(*args)), theirs),
        }
        for index in range(rounds):
            with progress(f"all-reduce: round {index + 1} of {rounds}"):
                for megabytes, times in sums.items():
                    for name in order.sample(sorted(run), len(run)):
                        seconds, kept = run[name](megabytes, times)
                        kept[megabytes].append(max(seconds))
    for megabytes in sums:
        group = "2 processes: all-reduce over TensorFlow's RING"
        yield Comparison(group, f"{megabytes} MB", ours[megabytes], theirs[megabytes], 1.0)


def while_stopped(pool: WorkerPool, function: Callable[[], Any]) -> Any:
    """Horovod's threads poll for work all the time, and must not while the rival is timed on their cores."""
    pids = pool.pids
    for pid in pids:
        os.killpg(pid, signal.SIGSTOP)
    try:
        return function()
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGCONT)


class Ring:
    """Two processes of a MultiWorkerMirroredStrategy.

    Args:
        cores: Where they may run.
    """

    def __init__(self, cores: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        addresses = [f"127.0.0.1:{port}" for port in free_ports(len(cores))]
        self._connections, self._processes = [], []
        for rank, core in enumerate(cores):
            connection, theirs = context.Pipe()
            arguments = rank, core, addresses, theirs
            self._processes.append(context.Process(target=contestants.serve_ring, args=arguments, daemon=True))
            self._connections.append(connection)
            self._processes[-1].start()
            theirs.close()

    def run(self, megabytes: int, times: int) -> list[float]:
        """Returns the seconds of each rank."""
        for connection in self._connections:
            connection.send((megabytes, times))
        return [self._answer(connection) for connection in self._connections]

    def _answer(self, connection: Any) -> Any:
        if not connection.poll(ROUND_SECONDS):
            sys.exit(f"TensorFlow's RING didn't answer within {ROUND_SECONDS:g} s.")
        return connection.recv()

    def __enter__(self) -> Ring:
        for connection in self._connections:
            assert self._answer(connection) == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# --- What comes out ---


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Reports on stderr what is running, and how long it took."""
    print(what, end=" ... ", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def save(comparisons: list[Comparison], load: float, output: Path) -> None:
    """Writes the times so far, and on what they were measured."""
    output.mkdir(parents=True, exist_ok=True)
    times = {"where": where(load), "comparisons": [asdict(comparison) for comparison in comparisons]}
    (output / TIMES).write_text(json.dumps(times, indent=1) + "\n")


def where(load: float) -> str:
    """Returns one line: when, on what machine, with which versions."""
    found = []
    for name in ("keras", "tensorflow-cpu", "tensorflow", "horovod"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores with a load of {load:.1f} from other programs, "
        f"Python {platform.python_version()}, {', '.join(found)}."
    )


def write(output: Path, to_docs: bool) -> None:
    """Makes table and plot of saved times, in their folder, and in docs/ if asked to."""
    times = json.loads((output / TIMES).read_text())
    comparisons = [Comparison(**each) for each in times["comparisons"]]
    text = f"{report.table(comparisons)}\n\n{times['where']}"
    print(text)
    (output / "table.md").write_text(text + "\n")
    try:
        for path in [output / "plot.png", *([PAGE.parent / PLOT] if to_docs else [])]:
            report.plot(comparisons, path)
    except ModuleNotFoundError as error:
        print(f"No plot: {error}. Install it: python -m pip install '.[benchmarks]'", file=sys.stderr)
    if to_docs:
        shown = f"{text}\n\n![The same ratios as a plot, with every round]({PLOT})"
        PAGE.write_text(report.replaced(PAGE.read_text(), shown))


if __name__ == "__main__":
    main()
