"""Lines that a user meets on a terminal: the banner, TensorFlow's notes, `breakpoint()` with several ranks."""

from __future__ import annotations

import logging
import os
import pdb
import sys
import threading
import time
from typing import Any

import pytest

from keras_dist.environment import Topology
from keras_dist.errors import ConfigurationError
from keras_dist.logging import announce, without_notes_of_tensorflow
from keras_dist.training import synchronizer
from tests.limits import limit


def test_a_line_has_been_read_when_the_script_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    read: list[bytes] = []

    def read_later() -> None:
        time.sleep(0.05)
        read.append(os.read(reader, 100))

    thread = threading.Thread(target=read_later)
    thread.start()
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader):
        monkeypatch.setattr(sys, "stderr", pipe)
        announce("a line")
        assert read == [b"a line\n"]
        thread.join()


def test_nobody_waits_for_a_reader_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe, os.fdopen(reader):
        monkeypatch.setattr(sys, "stderr", pipe)
        start = time.monotonic()
        announce("a line")
        assert time.monotonic() - start < limit(2.0)


def test_notes_of_tensorflow_are_hidden_and_warnings_shown(caplog: pytest.LogCaptureFixture) -> None:
    tensorflow = logging.getLogger("tensorflow")
    before = tensorflow.level
    tensorflow.setLevel(logging.INFO)
    try:
        with without_notes_of_tensorflow():
            tensorflow.info("Reduce to CPU:0")
            tensorflow.warning("look out")
        assert tensorflow.level == logging.INFO
    finally:
        tensorflow.setLevel(before)
    assert "Reduce to" not in caplog.text


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
