"""How fast keras_dist is beside plain Keras, Horovod and ClusterCoordinator loops written by hand, and PyTorch DDP.

    python benchmarks/bench.py --goals    # only what has a goal: about 40 minutes on two idle cores; one table
    python benchmarks/bench.py            # all: about two hours
    python benchmarks/bench.py --quick    # some minutes: shows only that it works
    python benchmarks/bench.py --only all-reduce ddp --docs    # some sections, and their tables on the page
    python benchmarks/bench.py --goals --render --docs         # the page's table of goals, from all that was measured

Each process has its own core and one thread. In each round all contestants take their turn in a random order; the
processes of the others are stopped meanwhile. In most parts, half of the rounds are made with new processes, because
their memory layout matters too. Absolute times depend on the machine and are not shown; ratios within one round are.
Ctrl-C keeps what was measured so far. Sections have files of their own: each can be measured at another time, with
--only.

Contestants that need torch are left out where it is not installed: python -m pip install '.[benchmarks-torch]'
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
import ps_contestants as ps
import report
from contestants import ADAM, SGD, Case, Sum
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

from keras_dist.environment import GLIBC_TUNABLES
from keras_dist.launcher.cluster import HorovodCluster
from keras_dist.launcher.processes import LARGE_PAGES
from keras_dist.testing import WorkerPool

PAGE = ROOT / "docs" / "benchmarks.md"
GOALS = "goals"
RANKS, BLOCKS = 2, 2
HAS_TORCH = importlib.util.find_spec("torch") is not None

# So many executions that a round takes about half a second on an idle machine.
STEPS = [Case(TINY, 20, 8), Case(MLP, 20, 1), Case(CNN, 20, 1), Case(TRANSFORMER, 20, 1)]
STEPS += [Case(TINY, 1, 100), Case(MLP, 1, 8), Case(CNN, 1, 15), Case(TRANSFORMER, 1, 8)]
TRAINING = [dataclasses.replace(case, optimizer=optimizer) for optimizer in (SGD, ADAM) for case in STEPS]
TUNING = [
    Case(model, 1, steps - 1, optimizer=optimizer)
    for optimizer in (SGD, ADAM)
    for model, steps in zip(MODELS, (400, 32, 64, 32), strict=True)
]
ON_DEVICES = [Case(model, 1, count, 128, ADAM) for model, count in zip(MODELS, (100, 8, 8, 8), strict=True)]
SERVED = [Case(ps.MLP, 1, 100), Case(ps.WORK, 1, 40)]
SMALL, LARGE = models.DIGITS
WIRE = [Case(TINY, 20, 8), Case(MLP, 20, 1), Sum(1, 40), Sum(25, 4), Sum(100, 2)]
STRONG = [Case(SMALL, 1, 80, 32), Case(SMALL, 1, 30, 256), Case(LARGE, 1, 10, 64), Case(LARGE, 1, 3, 256)]
SUMS = [Sum(1, 40), Sum(25, 4), Sum(100, 2)]

# --- Contestants ---

PLAIN, SERIAL, ALONE = "plain Keras", "serial", "processes that don't talk"
SMALL_PAGES, RANKS_WITH_SMALL_PAGES = "plain Keras, pages of 4 KB", "horovod, pages of 4 KB"
HOROVOD, LOOP, LOOP_ON_OUR_RANKS = "horovod", "loop", "loop on our ranks"
DDP, DDP_SERIAL, DDP_FUSED = "DDP", "DDP, one process", "DDP, fused"
TUNED, TUNED_RANKS = "tuned", "tuned ranks"
MULTI_WORKER, MIRRORED, PARAMETER_SERVER = "multi_worker", "mirrored", "parameter_server"
BOTH_CORES, LOOPBACK, FINGERPRINT = "one process on both cores", "loopback", "fingerprint"
COMPRESSIONS = ("fp16", "bf16")
BACKENDS = (MULTI_WORKER, MIRRORED, PARAMETER_SERVER)
MODES, WORKERS = {"sync": "sync", "async": "async", "ClusterCoordinator by hand": ps.HAND_WRITTEN}, (1, 2, 4)
SYNC, ASYNC, BY_HAND = ({n: f"{mode}, {n} worker{'s' * (n > 1)}" for n in WORKERS} for mode in MODES)
PLAIN_SERVED = "plain Keras in one process"
CONTESTANTS = {
    PLAIN: Contestant("serial", "plain_keras"),
    SERIAL: Contestant("serial", "ours"),
    ALONE: Contestant("alone", "plain_keras"),
    SMALL_PAGES: Contestant("small pages", "plain_keras"),
    RANKS_WITH_SMALL_PAGES: Contestant("horovod, small pages", "ours"),
    HOROVOD: Contestant("horovod", "ours"),
    LOOP: Contestant("loop", "horovod_loop"),
    LOOP_ON_OUR_RANKS: Contestant("horovod loop", "horovod_loop"),
    DDP: Contestant("ddp", "torch_ddp"),
    DDP_SERIAL: Contestant("torch", "torch_ddp"),
    DDP_FUSED: Contestant("ddp", "torch_ddp:fused"),
    TUNED: Contestant("serial", "ours:tune"),
    TUNED_RANKS: Contestant("horovod", "ours:tune"),
    MULTI_WORKER: Contestant("multi_worker", "ours"),
    MIRRORED: Contestant("mirrored", "ours"),
    PARAMETER_SERVER: Contestant("parameter_server", "ours:whole"),
    BOTH_CORES: Contestant("both cores", "ours", threads=RANKS),
    LOOPBACK: Contestant("loopback", "loopback"),
    FINGERPRINT: Contestant("serial", "fingerprint"),
    **{name: Contestant(name, "ours_compressed") for name in COMPRESSIONS},
    PLAIN_SERVED: Contestant("serial", "servers:plain"),
    **{
        names[count]: Contestant(f"{count} workers", f"servers:{mode}")
        for mode, names in zip(MODES.values(), (SYNC, ASYNC, BY_HAND), strict=True)
        for count in WORKERS
    },
}
WITH_TORCH = (DDP, DDP_SERIAL, DDP_FUSED)
# Contestants whose processes together train on a batch for each of two replicas: their losses must be the same.
GLOBAL = (HOROVOD, LOOP, LOOP_ON_OUR_RANKS, *BACKENDS, PLAIN_SERVED, *SYNC.values())


def started_pools(cores: list[int], folder: str) -> Pools:
    """Returns the pools of all contestants. None runs before it is needed."""
    first, small_pages = cores[:1], {**os.environ, GLIBC_TUNABLES: ""}
    makers: dict[str, Callable[[], Any]] = {
        "serial": lambda: WorkerPool(1, "serial"),
        "both cores": lambda: WorkerPool(1, "serial"),
        "small pages": lambda: WorkerPool(1, "serial", environ=small_pages),
        "horovod, small pages": lambda: WorkerPool(RANKS, "horovod", environ=small_pages),
        "horovod": lambda: WorkerPool(RANKS, "horovod"),
        "horovod loop": lambda: WorkerPool(RANKS, "horovod"),  # of its own: in the same ranks it made `fit` slower
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
    served = {f"{count} workers": functools.partial(WorkerPool, count, "parameter_server") for count in WORKERS}
    of_one, makers = ("serial", "torch", "small pages"), {**makers, **served}
    cores_of = {name: first if name in of_one else cores for name in makers}
    return Pools(makers, cores_of, awake=["parameter_server", *served])


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
        over: The two contestants; with four of them, the ratio of the first two by the ratio of the others.
        goals: By model, steps an execution and optimizer, or by megabytes.
        at_least: Whether more is better.
        is_reported: Whether it is shown among the goals, though it has none.
    """

    group: str
    over: tuple[str, ...]
    goals: Mapping[Any, float] = dataclasses.field(default_factory=dict)
    at_least: bool = False
    is_reported: bool = False

    def goal_of(self, job: Case | Sum) -> float | None:
        return self.goals.get(job.megabytes if isinstance(job, Sum) else key(job))

    def times(self, by_name: Mapping[str, list[float]]) -> tuple[list[float], list[float]]:
        """Returns what is divided in each round, and by what."""
        one, other, *more = (by_name[name] for name in self.over)
        if not more:
            return one, other
        return [a * b for a, b in zip(one, more[1], strict=True)], [a * b for a, b in zip(other, more[0], strict=True)]


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of the page, between its markers.

    Args:
        name: Of its markers.
        ratio: What its numbers are.
        rows: Of each case.
        is_goal: Whether its goals are in the table of goals.
    """

    name: str
    ratio: str
    rows: Sequence[Row]
    is_goal: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """Cases that are timed with the same contestants.

    Args:
        jobs: The cases.
        sections: What is shown of them.
        left_out: Contestants that a case is timed without.
        blocks: How often its processes are started: once where it takes long to make them ready.
    """

    jobs: Sequence[Case | Sum]
    sections: Sequence[Section]
    left_out: Callable[[Any], Sequence[str]] = lambda job: ()
    blocks: int = BLOCKS

    def rows(self, section: Section, job: Case | Sum, only_goals: bool = False) -> list[Row]:
        """Returns the rows that a case has in a section: without torch's where it is not installed."""
        missing = {*self.left_out(job), *(() if HAS_TORCH else WITH_TORCH)}
        rows = [row for row in section.rows if not missing & {*row.over}]
        return [row for row in rows if not only_goals or row.is_reported or row.goal_of(job) is not None]

    def rivals(self, sections: Sequence[Section], job: Case | Sum, only_goals: bool = False) -> list[str]:
        """Returns the contestants of a case."""
        rows = [row for section in sections for row in self.rows(section, job, only_goals)]
        return [*dict.fromkeys(name for row in rows for name in row.over)]


def key(case: Case) -> tuple[str, int, str]:
    return case.model, case.steps_per_execution, case.optimizer


def goals(optimizer: str, at_20: Sequence[float], at_1: Sequence[float] = ()) -> dict[tuple[str, int, str], float]:
    return {
        (model, steps, optimizer): goal
        for steps, each in ((20, at_20), (1, at_1))
        for model, goal in zip(MODELS, each, strict=False)
    }


EFFICIENCY = goals(ADAM, [0.60, 0.90, 0.97, 0.95])
OVER_DDPS = goals(SGD, [1.0] * 4, [1.0] * 4)
OVER_DDP = {(model, 20, ADAM): 1.1 for model in (MLP, TRANSFORMER)}
OVER_LOOP = goals(SGD, [1.0] * 4, [1.05] * 4) | goals(ADAM, [1.0] * 4, [1.05] * 4)
OVER_PLAIN = goals(SGD, [1.01] * 4, [1.01] * 4) | goals(ADAM, [1.01] * 4, [1.01] * 4)
TUNED_OVER_PLAIN = goals(SGD, (), [1.02] * 4) | goals(ADAM, (), [1.02] * 4) | {(MLP, 1, ADAM): 0.55}
TUNED_OVER_DDP = {(model, 1, SGD): 1.0 for model in (MLP, CNN, TRANSFORMER)}
OF_A_STEP = goals(SGD, [0.01] * 4)
OF_LOOPBACK = {25: 0.6, 100: 0.6}
LIMIT = "share of the loopback link's limit"
OF_SERVERS = [
    *((ASYNC[count], BY_HAND[count], {(ps.MLP, 1, SGD): 1.1}) for count in WORKERS),
    *((SYNC[count], SYNC[1], {(ps.WORK, 1, SGD): 1.0}) for count in (2, 4)),
    (SYNC[1], PLAIN_SERVED, {(ps.WORK, 1, SGD): 1.5}),
]


def left_out_of_training(case: Case) -> list[str]:
    """Backends are compared at 1 step an execution, where the limits of the machine are not."""
    others = list(BACKENDS) if case.steps_per_execution > 1 else [ALONE]
    if case.optimizer == SGD or key(case) not in OVER_DDP:
        others.append(DDP_FUSED)
    return others if case.optimizer == SGD else [*others, ALONE, LOOP_ON_OUR_RANKS]


def left_out_of_serving(case: Case) -> list[str]:
    return [PLAIN_SERVED, *SYNC.values()] if case.model == ps.MLP else [*ASYNC.values(), *BY_HAND.values()]


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
                    Row("Efficiency of 2 processes against plain Keras in one", (PLAIN, HOROVOD), EFFICIENCY, True),
                    Row("PyTorch DDP over Gloo", (DDP_SERIAL, DDP), at_least=True),
                    Row("Two processes that don't talk: the limit of the machine", (PLAIN, ALONE), at_least=True),
                ],
                is_goal=True,
            ),
            Section(
                "ddp",
                "Ratio",
                [
                    Row(
                        "Efficiency over PyTorch DDP's own", (PLAIN, HOROVOD, DDP_SERIAL, DDP), OVER_DDPS, at_least=True
                    ),
                    Row("2 processes: samples per second over PyTorch DDP's (Gloo)", (DDP, HOROVOD), OVER_DDP, True),
                    Row("The same over DDP with Adam(fused=True)", (DDP_FUSED, HOROVOD), {}, True, is_reported=True),
                ],
                is_goal=True,
            ),
            Section(
                "horovod loop",
                "Time over the rival's",
                [
                    Row("fit over a hand-written Horovod loop", (HOROVOD, LOOP), OVER_LOOP),
                    Row("fit over the same loop after kd.init()", (HOROVOD, LOOP_ON_OUR_RANKS)),
                ],
                is_goal=True,
            ),
            Section(
                "backends",
                "Time over the rival's",
                [Row(f"2 replicas: {name} over horovod", (name, HOROVOD)) for name in BACKENDS],
            ),
        ],
        left_out_of_training,
    ),
    "large pages": Part(
        [case for case in STEPS if case.model == MLP or case.steps_per_execution == 1],
        [
            Section(
                "large pages",
                "Ratio",
                [
                    Row(f"{who}: time with pages of 2 MB over that with pages of 4 KB", pair)
                    for who, pair in (
                        ("Plain Keras", (PLAIN, SMALL_PAGES)),
                        ("2 ranks", (HOROVOD, RANKS_WITH_SMALL_PAGES)),
                    )
                ],
            )
        ],
        blocks=5,  # what they bring depends on where the memory of a process lies
    ),
    "tuning": Part(
        TUNING,
        [
            Section(
                "tuning",
                "Ratio",
                [
                    Row("tune=True in one process: time over plain Keras", (TUNED, PLAIN), TUNED_OVER_PLAIN),
                    Row("tune=True on 2 ranks: samples per second over DDP", (DDP, TUNED_RANKS), TUNED_OVER_DDP, True),
                ],
                is_goal=True,
            )
        ],
        blocks=1,
    ),
    "mirrored": Part(
        ON_DEVICES,
        [
            Section(
                "mirrored",
                "Time over the rival's",
                [
                    Row(f"mirrored on 2 logical CPU devices over plain Keras on {name}", pair, is_reported=True)
                    for name, pair in (("one core", (MIRRORED, PLAIN)), ("both cores", (MIRRORED, BOTH_CORES)))
                ],
                is_goal=True,
            )
        ],
        blocks=1,
    ),
    "parameter servers": Part(
        SERVED,
        [
            Section(
                "parameter servers",
                "Time over the rival's",
                [
                    Row(f"Parameter servers: {one} over {other}", (one, other), goals)
                    for one, other, goals in OF_SERVERS
                ],
                is_goal=True,
            )
        ],
        left_out_of_serving,
        blocks=1,
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
        [case for case in STEPS if case.steps_per_execution > 1],
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
                "strong scaling",
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
    if job.model in ps.MODELS:
        return job.model
    side, count = models.DIGITS.get(job.model), job.steps_per_execution
    name = (f"{side} × {side} pixels" if side else job.model) + f", {ADAM}" * (job.optimizer == ADAM)
    return f"{name}, batches of {job.batch}" if job.batch else f"{name}, {count} step{'s' * (count > 1)} an execution"


def compared(
    part: Part, section: Section, times: Mapping[Case | Sum, Times], only_goals: bool = False
) -> Iterator[Comparison]:
    """Yields the rows of a section for the cases that were timed."""
    for row in section.rows:
        for job, by_name in times.items():
            if row in part.rows(section, job, only_goals) and all(name in by_name for name in row.over):
                yield Comparison(row.group, title(job), *row.times(by_name), row.goal_of(job), row.at_least)


# --- The run ---


def main() -> int:
    args = parse()
    interrupted = False
    if not args.render:
        cores, load = pick_cores(RANKS), os.getloadavg()[0]
        # All contestants have the pages that `keras-dist run` lets malloc ask for.
        os.environ.update({**ONE_THREAD, **PATIENCE, GLIBC_TUNABLES: LARGE_PAGES, "TF_CPP_MIN_LOG_LEVEL": "2"})
        for name, part in PARTS.items():
            if not interrupted and (sections := [each for each in part.sections if each.name in args.only]):
                interrupted = not measured(name, part, sections, cores, load, args)
    write(args)
    return 130 if interrupted else 0


def parse() -> argparse.Namespace:
    sections = {section.name: section.is_goal for part in PARTS.values() for section in part.sections}
    choices = [name.replace(" ", "-") for name in sections]
    parser = parser_of(__doc__, None)
    parser.add_argument("--only", nargs="+", choices=choices, default=choices, help="sections (default: all)")
    parser.add_argument("--goals", action="store_true", help="only what has a goal, into a folder of its own")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of the cases that train")
    args = parsed(parser)
    if args.docs and (args.quick or args.rounds < ROUNDS or tuple(args.models) != MODELS):
        parser.error(f"--docs needs whole parts: no --quick, no --models, {ROUNDS} rounds or more.")
    args.output = args.output or Path("runs/goals" if args.goals else "runs/bench")
    args.only = [name for name, is_goal in sections.items() if name.replace(" ", "-") in args.only]
    if args.goals:
        args.only = [name for name in args.only if sections[name]]
    return args


def measured(
    name: str, part: Part, sections: Sequence[Section], cores: list[int], load: float, args: argparse.Namespace
) -> bool:
    """Measures sections of one part, saves after each case what is there. Returns False if the user has stopped it."""
    rivals = {job: part.rivals(sections, job, args.goals) for job in shortened(part.jobs, args)}
    times: dict[Case | Sum, Times] = {job: {} for job, names in rivals.items() if names}
    blocks = 1 if args.quick or args.rounds < BLOCKS else part.blocks

    def save_all() -> None:
        for section in sections:
            if comparisons := [*compared(part, section, times, args.goals)]:
                save(comparisons, load, args.output / section.name)

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
                        taking_part = {rival: contestant_for(rival, job) for rival in rivals[job]}
                        take_turns(pools, taking_part, job, rounds, times[job], block)
                    save_all()
    except KeyboardInterrupt:
        print("Stopped. What was measured is kept.", file=sys.stderr)
        save_all()
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
        dataclasses.replace(job, times=1) if isinstance(job, Sum) else dataclasses.replace(job, executions=1)
        for job in jobs
    ]


def write(args: argparse.Namespace) -> None:
    """Makes the tables and the plots of saved times, in their folder, and in docs/ if asked to."""
    page, shown, reached = PAGE.read_text(), [], list[Comparison]()
    measured_on: dict[str, list[str]] = {}
    for section in (section for part in PARTS.values() for section in part.sections):
        folder = args.output / section.name
        if not (folder / report.TIMES).exists():
            continue
        comparisons, where = report.load(folder)
        shown += comparisons
        if section.is_goal:
            reported = [row.group for row in section.rows if row.is_reported]
            reached += [each for each in comparisons if each.goal is not None or each.group in reported]
            measured_on.setdefault(where, []).append(section.name)
        if not args.goals:
            page = put(page, section.name, f"{report.table(comparisons, section.ratio)}\n\n{where}", folder)
    if not shown:
        sys.exit(f"Nothing was measured: no times in {args.output}")
    if reached:
        lines = [f"{', '.join(names)}: {where}" for where, names in measured_on.items()]
        page = put(page, GOALS, "\n\n".join([report.table(reached, "Ratio"), *lines]), args.output)
    name, drawn, text = (GOALS, reached, "Goals") if args.goals else ("benchmarks", shown, "All ratios of this page")
    with contextlib.suppress(*(() if args.docs else (ModuleNotFoundError,))):
        report.plot(drawn, args.output / "plot.png")
    if args.docs:
        shutil.copy(args.output / "plot.png", PAGE.parent / "images" / f"{name}.png")
        page = report.replaced(page, f"![{text}, with every round](images/{name}.png)", *report.markers(f"{name} plot"))
        PAGE.write_text(page)


def put(page: str, name: str, text: str, folder: Path) -> str:
    """Prints a table, writes it into its folder, and returns the page with it."""
    print(f"{name}\n\n{text}\n")
    (folder / "table.md").write_text(text + "\n")
    return report.replaced(page, text, *report.markers(name))


if __name__ == "__main__":
    sys.exit(main())
