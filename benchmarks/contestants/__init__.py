"""What the benchmarks time: one file for each rival. This runs on the ranks.

Each file has a function `build(case)`, which returns a function that trains for one round, and returns its seconds and
its loss. What stands behind a colon in a contestant's name is its second argument. Those that can sum over the ranks
have a function `build_sum(job)`, which returns a function that sums, and returns its seconds.
"""

import dataclasses
import importlib
import time
from collections.abc import Callable
from typing import Any

BATCH = 64  # of each process
SGD, ADAM = "SGD", "Adam"
ALIKE = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained in a round.

    Args:
        model: Its name in `models.py`.
        steps_per_execution: How many steps are made before Python reads the loss.
        executions: How many of these are timed in a round.
        batch: The global batch size. `None`: `BATCH` for each process.
        optimizer: `SGD` (with momentum) or `ADAM`.
        jit_compile: As in `compile` of Keras; the others don't have it.
    """

    model: str
    steps_per_execution: int
    executions: int
    batch: int | None = None
    optimizer: str = SGD
    jit_compile: bool | str = "auto"

    @property
    def steps(self) -> int:
        """All steps of a round. Those of the first execution aren't timed."""
        return self.steps_per_execution * (self.executions + 1)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum over the ranks.

    Args:
        megabytes: Of float32 that each rank has.
        times: How many sums are a round.
    """

    megabytes: float
    times: int

    @property
    def count(self) -> int:
        """How many numbers are summed."""
        return int(self.megabytes * 2**20) // 4


_READY: dict[tuple[str, Case | Sum], Callable[[], tuple[float, float]]] = {}


def build(contestant: str, job: Case | Sum, threads: int = 1) -> None:
    """Builds a contestant on this rank, and runs it once: traces, and warms up. It is kept for its rounds.

    Args:
        contestant: The name of its file here, perhaps with an argument: `"file:argument"`.
        job: What to do.
        threads: How many of them compute, where that is TensorFlow's.
    """
    if threads > 1:
        _set_threads(threads)
    file, *arguments = contestant.split(":")
    module = importlib.import_module(f"contestants.{file}")
    run = _READY[contestant, job] = (module.build if isinstance(job, Case) else module.build_sum)(job, *arguments)
    run()


def time_round(contestant: str, job: Case | Sum) -> tuple[float, float]:
    """Runs one round on this rank. Returns the seconds, and the loss; of a sum, what every number of it is."""
    return _READY[contestant, job]()


def _set_threads(threads: int) -> None:
    """Before TensorFlow computes for the first time in this process."""
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() != threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)


def check_alike(losses: dict[str, float]) -> None:
    """All train on the same batches: if their losses differ, one of them does other work."""
    if losses and max(losses.values()) - min(losses.values()) > ALIKE:
        raise RuntimeError(f"The contestants don't train alike: {losses}")


def timed_sums(total: Callable[[], Any], last_of: Callable[[Any], float], times: int, size: int) -> tuple[float, float]:
    """Times sums of tensors that hold the rank plus one.

    Args:
        total: Makes one sum, and returns it.
        last_of: Returns its last number.
        times: How many.
        size: Number of ranks.
    """
    start = time.perf_counter()
    for _ in range(times):
        result = total()
    seconds, right = time.perf_counter() - start, size * (size + 1) / 2
    if last_of(result) != right:
        raise RuntimeError(f"A wrong sum over {size} ranks: {last_of(result)}. Expected: {right}")
    return seconds, right
