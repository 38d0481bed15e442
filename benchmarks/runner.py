"""Runs contestants in turns: pinned, one at a time, in a random order, while the processes of all others are stopped.

So what disturbs the machine disturbs all, and the threads of one, some of which wait by spinning, disturb no other.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import contestants
from contestants import Case, Sum
from report import TIMES as TIMES
from report import Comparison

ROOT = Path(__file__).resolve().parents[1]
ROUND_SECONDS = 600.0
ROUNDS, QUICK_ROUNDS = 15, 2
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
# A rank that was stopped while others had their turn must not be taken for lost.
PATIENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "600", "KERAS_DIST_ANSWER_TIMEOUT": "600", "KERAS_DIST_WAIT_TIMEOUT": "600"}
Times = dict[str, list[float]]  # the seconds of each round, by contestant


# --- Options ---


def parser_of(description: str | None, output: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"of each case (default: {ROUNDS}, with --quick {QUICK_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="few and short rounds: not to be quoted")
    parser.add_argument("--output", type=Path, default=output, help=f"folder (default: {output or 'in runs/'})")
    parser.add_argument("--render", action="store_true", help="show an earlier run's times again")
    parser.add_argument("--docs", action="store_true", help="also write the tables and plots in docs/")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, with the number of rounds."""
    args = parser.parse_args()
    if args.rounds is None:
        args.rounds = QUICK_ROUNDS if args.quick else ROUNDS
    if args.rounds < 1:
        parser.error(f"--rounds must be 1 or more. Received: {args.rounds}")
    return args


def pick_cores(count: int) -> list[int]:
    """Returns a core for each rank, and restricts this process and its children to these cores."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count:
        sys.exit(f"This needs {count} cores, one for each process. Received: {len(allowed)}")
    os.sched_setaffinity(0, allowed[:count])
    return allowed[:count]


# --- Turns ---


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One that trains or sums.

    Args:
        pool: The name of its processes, which it may share with others.
        file: Its file in `contestants/`.
        threads: How many threads of TensorFlow compute in each of its processes.
        is_compared: Whether its losses must be those of the others.
    """

    pool: str
    file: str
    threads: int = 1
    is_compared: bool = True


class Pools:
    """The processes of all contestants. Each is started when it is first needed, and stopped when it isn't its turn.

    Args:
        makers: By name, what starts them: a function that returns a pool with `run`, `pids` and `close`.
        cores: The cores of each pool. Its processes are pinned to them in turn; one process gets all of them.
        awake: Those that are never stopped: a TensorFlow server is slow for seconds after it was.
    """

    def __init__(
        self, makers: Mapping[str, Callable[[], Any]], cores: Mapping[str, Sequence[int]], awake: Sequence[str] = ()
    ) -> None:
        self._makers, self._cores, self._awake = makers, cores, awake
        self._pools: dict[str, Any] = {}

    def time(self, contestant: Contestant, job: Case | Sum) -> tuple[float, float]:
        """Returns the seconds of a round, which are those of its slowest rank, and the loss on the first."""
        results = self._run(contestant.pool, contestants.time_round, contestant.file, job)
        return max(seconds for seconds, _ in results), results[0][1]

    def build(self, contestant: Contestant, job: Case | Sum) -> None:
        """Makes a contestant ready for its rounds."""
        if contestant.pool not in self._pools:
            self._pools[contestant.pool] = self._makers[contestant.pool]()
            self._run(contestant.pool, os.getpid)  # a WorkerPool starts with its first function
        self._run(contestant.pool, contestants.build, contestant.file, job, contestant.threads)

    def _run(self, name: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a function in the processes of a pool, which are awake only meanwhile."""
        pool = self._pools[name]
        self._signal(pool, signal.SIGCONT)
        try:
            results: list[Any] = pool.run(function, *args, timeout=ROUND_SECONDS)
            self._pin(name)
        finally:
            if name not in self._awake:
                self._signal(pool, signal.SIGSTOP)
        return results

    def _pin(self, name: str) -> None:
        """Also threads that were just made: TensorFlow makes some when it first computes."""
        pids, cores = self._pools[name].pids, self._cores[name]
        for index, pid in enumerate(pids):
            own = set(cores) if len(pids) == 1 else {cores[index % len(cores)]}
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.sched_setaffinity(int(thread), own)

    @staticmethod
    def _signal(pool: Any, signum: int) -> None:
        for pid in pool.pids:
            os.killpg(pid, signum)

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            self._signal(pool, signal.SIGCONT)
            pool.close()


def take_turns(
    pools: Pools, rivals: Mapping[str, Contestant], job: Case | Sum, rounds: int, times: Times, seed: int
) -> None:
    """Runs all contestants in each round, in a random order, and adds the seconds of each whole round to `times`."""
    order = random.Random(seed)
    for name, contestant in rivals.items():
        with progress(f"  making {name} ready"):
            pools.build(contestant, job)
    for _ in range(rounds):
        seconds, losses = {}, {}
        for name in order.sample(sorted(rivals), len(rivals)):
            seconds[name], loss = pools.time(rivals[name], job)
            if rivals[name].is_compared:
                losses[name] = loss
        contestants.check_alike(losses)
        for name, taken in seconds.items():
            times.setdefault(name, []).append(taken)


# --- What is kept ---


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Reports on stderr what is running, and how long it took."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    start = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def save(comparisons: Sequence[Comparison], load: float, output: Path) -> None:
    """Writes the times so far, and on what they were measured."""
    output.mkdir(parents=True, exist_ok=True)
    times = {"where": where(load), "comparisons": [dataclasses.asdict(comparison) for comparison in comparisons]}
    (output / f"{TIMES}.part").write_text(json.dumps(times, indent=1) + "\n")
    (output / f"{TIMES}.part").replace(output / TIMES)


def where(load: float) -> str:
    """Returns one line: when, on what machine, with which versions."""
    found = []
    for name in ("keras", "tensorflow-cpu", "tensorflow", "horovod", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return (
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.cpu_count()} cores with a load of {load:.1f} from other "
        f"programs, Python {platform.python_version()}, {', '.join(found)}."
    )


def processor() -> str:
    """Returns the name of the processor, as Linux knows it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
