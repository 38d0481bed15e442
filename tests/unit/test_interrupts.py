"""SIGTERM in a `fit` that commits: it waits for the end of a step, and ends the process if it comes again later."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from keras_dist.environment import Topology
from keras_dist.training import interrupts


def in_child(run: Callable[[], object]) -> int:
    if (pid := os.fork()) == 0:
        try:
            run()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def terminate(times: int) -> interrupts.Interrupts:
    found = interrupts.Interrupts()
    with found.terminable():
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if found.is_terminated() else 8)


@pytest.mark.parametrize(("times", "code"), [(0, 8), (1, 7), (3, 7)])
def test_sigterm_waits_for_the_end_of_a_step(times: int, code: int) -> None:
    assert in_child(lambda: terminate(times)) == code


def test_a_later_one_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_SAME_SECONDS", -1.0)
    assert in_child(lambda: terminate(2)) == 128 + signal.SIGTERM


def test_a_handler_of_the_script_stays() -> None:
    def run() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
        terminate(1)

    assert in_child(run) == 5


def test_afterwards_the_signal_ends_the_process_as_before() -> None:
    def run() -> None:
        with interrupts.Interrupts().terminable():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_child(run) == -signal.SIGTERM


class Store(dict[str, str]):
    put = dict.__setitem__


class Rank(threading.Thread):
    """Checks after each step, for which it waits for the other rank, and is asked to stop at some moment."""

    def __init__(self, rank: int, store: Store, step: threading.Barrier, asked_after: float) -> None:
        super().__init__()
        self.interrupts = interrupts.SharedInterrupts(Topology(rank, 2), store)  # type: ignore[arg-type]
        self._step = step
        self._asked = threading.Timer(asked_after, self.interrupts._publish, [signal.SIGTERM])
        self.checks = 0

    def run(self) -> None:
        self._asked.start()
        with contextlib.suppress(threading.BrokenBarrierError):
            while not self.interrupts.is_terminated():
                self.checks += 1
                time.sleep(random.uniform(0.0, 0.002))
                self._step.wait(60.0)
        self._asked.join()


def test_all_ranks_end_at_the_same_check_whenever_they_are_asked() -> None:
    for seed in range(60):
        random.seed(seed)
        step, store = threading.Barrier(2), Store()
        ranks = [Rank(rank, store, step, random.uniform(0.0, 0.01)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert (ranks[0].checks, step.broken) == (ranks[1].checks, False), seed
