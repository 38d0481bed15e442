"""Lines that a user meets on a terminal."""

from __future__ import annotations

import pdb
import sys
import traceback
from typing import Any

import keras
import pytest

from keras_dist.backends.local.serial import Serial
from keras_dist.environment import Topology
from keras_dist.errors import ConfigurationError, NotSupportedError, check_choice
from keras_dist.training import refusals, synchronizer
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
