"""How fast keras_dist is beside plain Keras, a Horovod loop written by hand, PyTorch DDP, and the machine's limits.

    python benchmarks/bench.py            # about 30 minutes on two idle cores
    python benchmarks/bench.py --quick    # some minutes: shows only that it works
    python benchmarks/bench.py --only all-reduce --docs    # one part, and its tables on the page

Each process has its own core and one thread. In each round all contestants take their turn in a random order; the
processes of the others are stopped meanwhile. Half of the rounds are made with new processes, because their memory
layout matters too. Absolute times depend on the machine and are not shown; ratios within one round are. Ctrl-C keeps
what was measured so far. A part that was interrupted is repeated with --only.

Contestants that need torch are left out where it is not installed: python -m pip install '.[benchmarks-torch]'
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import report
from contestants import Case, Sum
from models import CNN, MLP, MODELS, TINY, TRANSFORMER
from processes import Processes
from report import Comparison
from runner import (
    ONE_THREAD,
    PATIENCE,
    ROOT,
    ROUNDS,
    Contestant,
    Pools,
    Times,
    parsed,
    parser_of,
    pick_cores,
    progress,
    save,
    take_turns,
)

from keras_dist.launcher.cluster import HorovodCluster
from keras_dist.testing import WorkerPool

PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = "images/benchmarks.png"  # beside the page
RANKS, BLOCKS = 2, 2
HAS_TORCH = importlib.util.find_spec("torch") is not None

# So many executions that a round takes about half a second on an idle machine.
TRAINING = [Case(TINY, 20, 8), Case(MLP, 20, 1), Case(CNN, 20, 1), Case(TRANSFORMER, 20, 1)]
TRAINING += [Case(TINY, 1, 100), Case(MLP, 1, 8), Case(CNN, 1, 15), Case(TRANSFORMER, 1, 8)]
SMALL, LARGE = models.DIGITS
WIRE = [Case(TINY, 20, 8), Case(MLP, 20, 1), Sum(1, 40), Sum(25, 4), Sum(100, 2)]
STRONG = [Case(SMALL, 1, 80, 32), Case(SMALL, 1, 30, 256), Case(LARGE, 1, 10, 64), Case(LARGE, 1, 3, 256)]
SUMS = [Sum(1, 40), Sum(25, 4), Sum(100, 2)]

# --- Contestants ---

PLAIN, SERIAL, ALONE = "plain Keras", "serial", "processes that don't talk"
HOROVOD, LOOP, LOOP_ON_OUR_RANKS = "horovod", "loop", "loop on our ranks"
DDP, DDP_SERIAL = "DDP", "DDP, one process"
MULTI_WORKER, MIRRORED, PARAMETER_SERVER = "multi_worker", "mirrored", "parameter_server"
BOTH_CORES, LOOPBACK, FINGERPRINT = "one process on both cores", "loopback", "fingerprint"
COMPRESSIONS = ("fp16", "bf16")
BACKENDS = (MULTI_WORKER, MIRRORED, PARAMETER_SERVER)
CONTESTANTS = {
    PLAIN: Contestant("serial", "plain_keras"),
    SERIAL: Contestant("serial", "ours"),
    ALONE: Contestant("alone", "plain_keras"),
    HOROVOD: Contestant("horovod", "ours"),
    LOOP: Contestant("loop", "horovod_loop"),
    LOOP_ON_OUR_RANKS: Contestant("horovod", "horovod_loop"),
    DDP: Contestant("ddp", "torch_ddp"),
    DDP_SERIAL: Contestant("torch", "torch_ddp"),
    MULTI_WORKER: Contestant("multi_worker", "ours"),
    MIRRORED: Contestant("mirrored", "ours"),
    PARAMETER_SERVER: Contestant("parameter_server", "ours_whole"),
    BOTH_CORES: Contestant("both cores", "ours", threads=RANKS),
    LOOPBACK: Contestant("loopback", "loopback"),
    FINGERPRINT: Contestant("serial", "fingerprint"),
    **{name: Contestant(name, "ours_compressed") for name in COMPRESSIONS},
}
WITH_TORCH = (DDP, DDP_SERIAL)
# Contestants whose processes together train on a batch for each of two replicas: their losses must be the same.
GLOBAL = (HOROVOD, LOOP, LOOP_ON_OUR_RANKS, *BACKENDS)


def started_pools(cores: list[int], folder: str) -> Pools:
    """Returns the pools of all contestants. None runs before it is needed."""
    first = cores[:1]
    makers: dict[str, Callable[[], Any]] = {
        "serial": lambda: WorkerPool(1, "serial"),
        "both cores": lambda: WorkerPool(1, "serial"),
        "horovod": lambda: WorkerPool(RANKS, "horovod"),
        "multi_worker": lambda: WorkerPool(RANKS, "multi_worker"),
        "mirrored": lambda: WorkerPool(RANKS, "mirrored"),
        "parameter_server": lambda: WorkerPool(RANKS, "parameter_server"),
        "alone": lambda: Processes([dict(os.environ)] * RANKS),
        "loop": functools.partial(horovod_processes, "horovod_loop"),
        "ddp": lambda: Processes(rendezvous(folder, "ddp", RANKS), "contestants.torch_ddp"),
        "torch": lambda: Processes(rendezvous(folder, "torch", 1), "contestants.torch_ddp"),
        "loopback": lambda: Processes(rendezvous(folder, "loopback", RANKS), "contestants.loopback"),
        **{name: functools.partial(horovod_processes, "ours_compressed", COMPRESSION=name) for name in COMPRESSIONS},
    }
    of_one = ("serial", "torch")
    return Pools(makers, {name: first if name in of_one else cores for name in makers}, awake=["parameter_server"])


def horovod_processes(contestant: str, **environ: str) -> Processes:
    """Two processes that join by the `start` of a contestant, as `horovodrun` starts them."""
    cluster = HorovodCluster(RANKS, os.environ)
    environments = [{**cluster.environment(rank), **environ} for rank in range(RANKS)]
    return Processes(environments, f"contestants.{contestant}", close=cluster.close)


def rendezvous(folder: str, name: str, size: int) -> list[dict[str, str]]:
    """Returns the environments of processes that meet at a path."""
    own = {"RENDEZVOUS": f"{folder}/{name}-{time.monotonic_ns()}", "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**os.environ, **own, "RANK": str(rank)} for rank in range(size)]


# --- What is compared ---


@dataclasses.dataclass(frozen=True)
class Row:
    """One ratio of each case: the seconds of one contestant by those of another.

    Args:
        group: What it is compared with.
        over: The two contestants.
        goals: By model and steps an execution, or by megabytes.
        at_least: Whether more is better.
    """

    group: str
    over: tuple[str, str]
    goals: Mapping[Any, float] = dataclasses.field(default_factory=dict)
    at_least: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of the page, between its markers.

    Args:
        name: Of its markers.
        ratio: What its numbers are.
        rows: Of each case.
    """

    name: str
    ratio: str
    rows: Sequence[Row]


@dataclasses.dataclass(frozen=True)
class Part:
    """Cases that are timed with the same contestants.

    Args:
        jobs: The cases.
        sections: What is shown of them.
        left_out: Contestants that a case is timed without.
    """

    jobs: Sequence[Case | Sum]
    sections: Sequence[Section]
    left_out: Callable[[Any], Sequence[str]] = lambda job: ()

    def rivals(self, job: Case | Sum) -> list[str]:
        """Returns the contestants of a case, without those of torch where it is not installed."""
        names = dict.fromkeys(name for section in self.sections for row in section.rows for name in row.over)
        missing = [*self.left_out(job), *(() if HAS_TORCH else WITH_TORCH)]
        return [name for name in names if name not in missing]


def goals(at_20: Sequence[float], at_1: Sequence[float] = ()) -> dict[tuple[str, int], float]:
    return {
        (model, steps): goal
        for steps, each in ((20, at_20), (1, at_1))
        for model, goal in zip(MODELS, each, strict=False)
    }


EFFICIENCY = goals([0.60, 0.70, 0.97, 0.90])
OVER_DDP = goals([2.5, 1.3, 1.15, 1.3], [2.0, 1.1, 1.1, 1.1])
OVER_LOOP = goals([1.03] * 4, [1.10] * 4)
OVER_PLAIN = goals([1.01] * 4, [1.01] * 4)
OF_A_STEP = goals([0.01] * 4)
OF_LOOPBACK = {25: 0.6, 100: 0.6}
LIMIT = "share of the loopback link's limit"

PARTS = {
    "training": Part(
        TRAINING,
        [
            Section(
                "serial",
                "Time over the rival's",
                [Row("One process: fit over plain Keras", (SERIAL, PLAIN), OVER_PLAIN)],
            ),
            Section(
                "weak scaling",
                "Efficiency",
                [
                    Row("keras_dist, horovod", (SERIAL, HOROVOD), EFFICIENCY, True),
                    Row("PyTorch DDP over Gloo", (DDP_SERIAL, DDP), at_least=True),
                    Row("Two processes that don't talk: the limit of the machine", (PLAIN, ALONE), at_least=True),
                ],
            ),
            Section(
                "horovod loop",
                "Time over the rival's",
                [
                    Row("fit over a hand-written Horovod loop", (HOROVOD, LOOP), OVER_LOOP),
                    Row("fit over the same loop after kd.init()", (HOROVOD, LOOP_ON_OUR_RANKS), OVER_LOOP),
                ],
            ),
            Section(
                "ddp",
                "Samples per second, ratio",
                [Row("2 processes: fit over PyTorch DDP (Gloo)", (DDP, HOROVOD), OVER_DDP, True)],
            ),
            Section(
                "backends",
                "Time over the rival's",
                [Row(f"2 replicas: {name} over horovod", (name, HOROVOD)) for name in BACKENDS],
            ),
        ],
        # Backends are compared at 1 step an execution, where the limits of the machine are not.
        lambda case: (ALONE, DDP_SERIAL) if case.steps_per_execution == 1 else BACKENDS,
    ),
    "all-reduce": Part(
        SUMS,
        [
            Section(
                "all-reduce",
                "Share of the limit",
                [
                    Row(f"keras_dist, horovod: {LIMIT}", (LOOPBACK, HOROVOD), OF_LOOPBACK, True),
                    Row(f"Horovod by hand: {LIMIT}", (LOOPBACK, LOOP), at_least=True),
                    Row(f"keras_dist, multi_worker: {LIMIT}", (LOOPBACK, MULTI_WORKER), at_least=True),
                    Row(f"torch, Gloo: {LIMIT}", (LOOPBACK, DDP), at_least=True),
                ],
            )
        ],
    ),
    "fingerprint": Part(
        [case for case in TRAINING if case.steps_per_execution > 1],
        [
            Section(
                "fingerprint",
                "Share of a step",
                [Row("Fingerprint of a batch, share of a step of 2 processes", (FINGERPRINT, HOROVOD), OF_A_STEP)],
            )
        ],
    ),
    "compression": Part(
        WIRE,
        [
            Section(
                "compression",
                "Time over the rival's",
                [Row(f'horovod: compression="{name}" over none', (name, HOROVOD)) for name in COMPRESSIONS],
            )
        ],
    ),
    "strong-scaling": Part(
        STRONG,
        [
            Section(
                "scaling",
                "Time over the rival's",
                [
                    Row("2 processes over one process on one core", (HOROVOD, SERIAL)),
                    Row("2 processes over one process on both cores", (HOROVOD, BOTH_CORES)),
                ],
            )
        ],
    ),
}


def title(job: Case | Sum) -> str:
    if isinstance(job, Sum):
        return f"{job.megabytes:g} MB"
    if job.batch is not None:
        side = models.DIGITS[job.model]
        return f"{side} × {side} pixels, batches of {job.batch}"
    count = job.steps_per_execution
    return f"{job.model}, {count} step{'s' * (count > 1)} an execution"


def goal_of(row: Row, job: Case | Sum) -> float | None:
    return row.goals.get(job.megabytes if isinstance(job, Sum) else (job.model, job.steps_per_execution))


def compared(section: Section, times: Mapping[Case | Sum, Times]) -> Iterator[Comparison]:
    """Yields the rows of a section for the cases that were timed."""
    for row in section.rows:
        for job, by_name in times.items():
            if by_name and all(name in by_name for name in row.over):
                one, other = (by_name[name] for name in row.over)
                yield Comparison(row.group, title(job), one, other, goal_of(row, job), row.at_least)


# --- The run ---


def main() -> int:
    args = parse()
    interrupted = False
    if not args.render:
        cores, load = pick_cores(RANKS), os.getloadavg()[0]
        os.environ.update(ONE_THREAD, TF_CPP_MIN_LOG_LEVEL="2", **PATIENCE)
        for name in args.only:
            interrupted = interrupted or not measured(name, cores, load, args)
    write(args)
    return 130 if interrupted else 0


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__, "runs/bench")
    parser.add_argument("--only", action="append", choices=[*PARTS], help="can be repeated (default: all parts)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of the part training")
    args = parsed(parser)
    if args.docs and (args.quick or args.rounds < ROUNDS or tuple(args.models) != MODELS):
        parser.error(f"--docs needs whole parts: no --quick, no --models, {ROUNDS} rounds or more.")
    args.only = args.only or [*PARTS]
    return args


def measured(name: str, cores: list[int], load: float, args: argparse.Namespace) -> bool:
    """Measures one part, and saves after each case what is there. Returns False if the user has stopped it."""
    part = PARTS[name]
    times: dict[Case | Sum, Times] = {job: {} for job in shortened(part.jobs, args)}
    blocks = 1 if args.quick or args.rounds < BLOCKS else BLOCKS
    try:
        for block in range(blocks):
            rounds = len(range(block, args.rounds, blocks))
            with (
                tempfile.TemporaryDirectory(prefix="keras_dist-bench-") as folder,
                started_pools(cores, folder) as pools,
            ):
                for index, job in enumerate(times):
                    what = f"{name}, start {block + 1} of {blocks}, case {index + 1} of {len(times)}: {title(job)}"
                    with progress(f"{what}, {rounds} rounds"):
                        rivals = {rival: contestant_for(rival, job) for rival in part.rivals(job)}
                        take_turns(pools, rivals, job, rounds, times[job], block)
                    save_part(part, times, load, args.output)
    except KeyboardInterrupt:
        print("Stopped. What was measured is kept.", file=sys.stderr)
        save_part(part, times, load, args.output)
        return False
    return True


def contestant_for(name: str, job: Case | Sum) -> Contestant:
    """Only those that share a global batch have the same losses; with a given global batch all do."""
    is_compared = isinstance(job, Case) and (job.batch is not None or name in GLOBAL)
    return dataclasses.replace(CONTESTANTS[name], is_compared=is_compared)


def shortened(jobs: Sequence[Any], args: argparse.Namespace) -> list[Any]:
    """Returns the cases of a run."""
    jobs = [job for job in jobs if getattr(job, "model", None) not in set(MODELS) - set(args.models)]
    if not args.quick:
        return jobs
    return [
        dataclasses.replace(job, times=1)
        if isinstance(job, Sum)
        else dataclasses.replace(job, steps_per_execution=min(2, job.steps_per_execution), executions=1)
        for job in jobs
    ]


def save_part(part: Part, times: Mapping[Case | Sum, Times], load: float, output: Path) -> None:
    for section in part.sections:
        if comparisons := [*compared(section, times)]:
            save(comparisons, load, output / section.name)


def write(args: argparse.Namespace) -> None:
    """Makes the tables and the plot of saved times, in their folder, and in docs/ if asked to."""
    page, shown = PAGE.read_text(), []
    for section in (section for part in PARTS.values() for section in part.sections):
        folder = args.output / section.name
        if not (folder / report.TIMES).exists():
            continue
        comparisons, where = report.load(folder)
        shown += comparisons
        text = f"{report.table(comparisons, section.ratio)}\n\n{where}"
        print(f"{section.name}\n\n{text}\n")
        (folder / "table.md").write_text(text + "\n")
        page = report.replaced(page, text, *report.markers(section.name))
    if not shown:
        sys.exit(f"Nothing was measured: no times in {args.output}")
    with contextlib.suppress(ModuleNotFoundError):
        report.plot(shown, args.output / "plot.png")
    if args.docs:
        report.plot(shown, PAGE.parent / PLOT)
        PAGE.write_text(
            report.replaced(page, f"![All ratios of this page, with every round]({PLOT})", *report.markers("plot"))
        )


if __name__ == "__main__":
    sys.exit(main())
