"""Lines that a user meets on a terminal. SIGTERM in a `fit` that commits: it waits for the end of a step."""

import contextlib
import os
import pdb
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import keras
import pytest

from keras_dist.backends.local.serial import Serial
from keras_dist.environment import Topology
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.training import interrupts, refusals, synchronizer
from keras_dist.training.refusals import _Look


@pytest.fixture
def pythons_own_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)


@pytest.mark.usefixtures("pythons_own_debugger")
def test_without_a_terminal_a_breakpoint_says_how_to_debug() -> None:
    synchronizer.install(Topology(0, 2, 0, 2))
    with pytest.raises(ConfigurationError, match="needs a terminal(.|\n)*keras-dist run -np 1"):
        breakpoint()


@pytest.mark.usefixtures("pythons_own_debugger")
def test_only_rank_0_stops_in_the_frame_of_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped: list[Any] = []
    monkeypatch.setattr(pdb.Pdb, "set_trace", lambda self, frame: stopped.append(frame.f_code.co_name))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    synchronizer.install(Topology(0, 2, 0, 2))
    breakpoint()
    assert stopped == ["test_only_rank_0_stops_in_the_frame_of_the_script"]
    assert "only rank 0 stops" in capsys.readouterr().err
    sys.breakpointhook = sys.__breakpointhook__
    synchronizer.install(Topology(1, 2, 1, 2))
    breakpoint()
    assert len(stopped) == 1


@pytest.mark.parametrize("variable", [None, "0"])
def test_another_debugger_stays(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    def own(*args: Any) -> None:
        pass

    monkeypatch.setattr(sys, "breakpointhook", own if variable is None else sys.__breakpointhook__)
    if variable:
        monkeypatch.setenv("PYTHONBREAKPOINT", variable)
    before = sys.breakpointhook
    synchronizer.install(Topology(0, 2, 0, 2))
    assert sys.breakpointhook is before


def said_at_exit(monkeypatch: pytest.MonkeyPatch, backend: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(_Look, "_warn", lambda self, text, *args: said.append(text % args))
    _Look(backend).at_exit()
    return said


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delattr(sys, "last_value", raising=False)
    backend = Serial()
    backend.topology = Topology(0, 2, 0, 2)
    return backend


def test_a_job_that_shared_no_work(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    assert said_at_exit(monkeypatch, backend) == [
        "nothing was distributed, so each of the 2 ranks does the whole work alone. Add `model = "
        "kd.distribute(model)` before `model.compile`; in a custom loop `optimizer = kd.distribute(optimizer)`."
    ]


@pytest.mark.parametrize("call", ["rank", "local_rank"])
def test_ranks_may_divide_the_work_themselves(monkeypatch: pytest.MonkeyPatch, backend: Any, call: str) -> None:
    from keras_dist import cluster

    monkeypatch.setattr(cluster, "_backend", backend)
    getattr(cluster, call)()
    assert said_at_exit(monkeypatch, backend) == []


def test_a_job_that_failed_has_another_message(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert said_at_exit(monkeypatch, backend) == []


@pytest.mark.parametrize("is_filtered", [True, False])
def test_an_error_shows_the_lines_of_the_script_only(is_filtered: bool) -> None:
    """As Keras's own do, which can show all."""

    def step(_: int) -> None:
        try:
            check_choice("option", "data", "x", ["y"])
        except ValueError as error:
            raise NotSupportedError("Refused.") from error

    (keras.config.enable_traceback_filtering if is_filtered else keras.config.disable_traceback_filtering)()
    try:
        with pytest.raises(NotSupportedError) as raised:
            keras.tree.map_structure(step, [1])
        error = refusals.in_few_lines(raised.value)
        text = "".join(traceback.format_exception(error))
    finally:
        keras.config.enable_traceback_filtering()
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert (set(files) == {__file__}) == is_filtered, files
    assert ("keras/src" in text) == (not is_filtered)
    assert ("direct cause" in text) == (not is_filtered)
    assert text.endswith("NotSupportedError: Refused.\n")


def in_child(run: Callable[[], object]) -> int:
    if (pid := os.fork()) == 0:
        try:
            run()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def terminate(times: int) -> interrupts.Interrupts:
    found = interrupts.Interrupts(Topology(), None)
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
        with interrupts.Interrupts(Topology(), None).terminable():
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_child(run) == -signal.SIGTERM


class Store(dict[str, str]):
    put = dict.__setitem__


class Rank(threading.Thread):
    """Checks after each step, for which it waits for the other rank, and is asked to stop at some moment."""

    def __init__(self, rank: int, store: Store, step: threading.Barrier, asked_after: float) -> None:
        super().__init__()
        self.interrupts = interrupts.Interrupts(Topology(rank, 2), store)  # type: ignore[arg-type]
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
