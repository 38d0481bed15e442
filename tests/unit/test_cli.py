"""The command line: its help, its errors, and the parts of the launcher that need no process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keras_dist import cli
from keras_dist.launcher import die_with_parent
from keras_dist.launcher.output import CHIEF, Console, Lines, RankOutput, Tail, WithoutNotes
from keras_dist.launcher.processes import Ended, describe, exit_code, first_cause, lost_peer, named_failed
from tests.limits import limit

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not be started')\n")
    return path


# Help.


def test_help_names_the_commands_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in out
        assert command.summary in out
    assert "kd.init()" in out
    assert "kd.distribute(model)" in out
    assert "keras-dist run -np 2 train.py" in out


def test_no_command_at_all_gets_the_same_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    without = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert without == capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["install-horovod", "--help"], ["commits", "--help"]])
def test_no_answer_needs_tensorflow(argv: list[str]) -> None:
    program = (
        "import json, sys\n"
        "from keras_dist import cli\n"
        "try: code = cli.main(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'horovod'} & {*sys.modules}\n"
        "print(json.dumps([code, sorted(heavy)]))\n"
    )
    started = time.monotonic()
    out = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, check=True).stdout
    assert json.loads(out.splitlines()[-1]) == [0, []]
    assert time.monotonic() - started < limit(5.0)  # 0.1 s on an idle machine


@pytest.mark.parametrize("module", ["keras_dist", "keras_dist.cli"])
def test_it_is_a_module_too(module: str) -> None:
    out = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert out == f"keras-dist {importlib.metadata.version('keras_dist')}\n"


def test_an_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["trian"])
    assert "choose from" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-np", "2", "x.py", "--a b"], ["x.py"], ["--workers", "2", "x.py"]])
def test_a_forgotten_run_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("keras-dist: The command is missing.\nReceived: keras-dist ")
    assert err.endswith(f"Remedy: Type `keras-dist run {shlex.join(arguments)}`.\n")


def test_a_backend_of_one_process_needs_no_launcher(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--backend", "mirrored", "-np", "2", "train.py"]) == 2
    assert "kd.init('mirrored') in the script, and `python train.py`" in capsys.readouterr().err


def test_run_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["run", "--help"])
    out = capsys.readouterr().out
    assert "keras-dist run -np 4 train.py --epochs 10" in out
    assert "rank-0.log" in out
    assert "--max-restarts N" in out
    assert "--grace SECONDS" in out


# Errors.


@pytest.mark.parametrize(
    ("arguments", "problem", "received"),
    [
        (["-np", "2"], "There is nothing to run.", "no script"),
        (["-np", "2", "-m"], "There is nothing to run.", "no script"),
        (["-np", "2", "nowhere.py"], "The script was not found.", "nowhere.py in "),
        (["-np", "2", "no-such-program"], "The program was not found.", "no-such-program"),
        (["-np", "0", "train.py"], "must be a positive integer", "-np 0"),
        (["-np", "-1", "train.py"], "must be a positive integer", "-np -1"),
        (["-np", "two", "train.py"], "must be a positive integer", "-np two"),
        (["train.py"], "The number of processes is missing.", "no -np"),
        (["train.py", "-np", "2"], "The number of processes is missing.", "-np after the script"),
        (["--backend", "mirrored", "-np", "2", "train.py"], "This backend can't be launched.", "backend='mirrored'"),
        (["--backend", "nccl", "-np", "2", "train.py"], "This backend can't be launched.", "backend='nccl'"),
        (["-np", "2", "--max-restarts", "-1", "train.py"], "must be an integer from 0 on", "--max-restarts -1"),
        (["-np", "2", "--max-restarts", "x", "train.py"], "must be an integer from 0 on", "--max-restarts x"),
        (["-np", "2", "--grace", "-1", "train.py"], "must be seconds, from 0 on", "--grace -1"),
        (["-np", "2", "--grace", "inf", "train.py"], "must be seconds, from 0 on", "--grace inf"),
        (["-np", "2", "--grace", "1min", "train.py"], "must be seconds, from 0 on", "--grace 1min"),
        (["-np", "2", "--log-dir", "train.py", "train.py"], "logs of the ranks can't be written", "train.py"),
    ],
)
def test_errors_say_the_problem_what_was_received_and_the_remedy(
    script: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
    received: str,
) -> None:
    assert cli.main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("keras-dist run: ")
    assert problem in err.splitlines()[0]
    assert f"Received: {'--log-dir ' if '--log-dir' in arguments else ''}{received}" in err
    assert "Remedy: " in err.splitlines()[2]
    assert "Traceback" not in err


def test_without_horovod_the_remedy_is_named(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    assert cli.main(["run", "-np", "2", "train.py"]) == 2
    err = capsys.readouterr().err
    assert "Horovod is not installed." in err
    assert "`keras-dist install-horovod`" in err


# The parts of the launcher that need no process.


def ends(*codes: int) -> list[Ended]:
    return [Ended(rank, code) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "lost_their_peer", "named", "cause", "code"),
    [
        ((0, 0), set(), None, None, 0),
        ((0, 3, 1), set(), None, 1, 3),
        ((1, 3), {0}, None, 1, 3),
        ((1, 3), {0}, 2, 1, 3),
        ((1, -9), {0}, None, 1, 137),
        ((1, 0), {0}, None, 1, 1),
        ((1, 0), {0}, 2, 2, 1),
        ((1, 0, -11), {0}, None, 2, 139),
        ((1, 1), {0, 1}, None, 0, 1),
        ((1, 1), {0, 1}, 2, 2, 1),
    ],
)
def test_the_first_cause(
    codes: tuple[int, ...], lost_their_peer: set[int], named: int | None, cause: int | None, code: int
) -> None:
    ended = ends(*codes)
    found = first_cause(ended, lambda end: end.rank in lost_their_peer, lambda end: named)
    assert (found and found.rank) == cause
    if found is not None:
        assert exit_code(found, ended) == code


def test_output_of_a_rank_that_lost_its_peer() -> None:
    assert lost_peer("keras_dist.errors.PeerLostError: Rank 1 has failed")
    assert lost_peer("UnknownError: Horovod has been shut down. This was caused by an exception")
    assert lost_peer("[/build/gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer")
    assert not lost_peer("ValueError: boom")
    assert named_failed("keras_dist.errors.PeerLostError: Rank 12 has failed, so rank 0 of 13 can't continue.") == 12
    gone = "keras_dist.errors.PeerLostError: Another rank has gone, so rank 0 of 2 can't continue."
    assert named_failed(gone) is None
    assert not lost_peer("ConnectionResetError: [Errno 104] Connection reset by peer")


def test_lines_are_passed_on_whole() -> None:
    written: list[bytes] = []
    lines = Lines("[1] ", written.append)
    for chunk in (b"a", b"b\nc\nd", b"\n", b"\ne"):
        lines(chunk)
    assert b"".join(written) == b"[1] ab\n[1] c\n[1] d\n[1] \n"
    lines.close()
    lines.close()
    assert written[-1] == b"[1] e\n"


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    written: list[bytes] = []
    lines = Lines("", written.append)
    for _ in range(100):
        lines(b"x" * 10_000)
    assert sum(map(len, written)) > 900_000


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_tensorflow_says_at_its_start_is_left_out(size: int) -> None:
    said = (
        b"a line\nWARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795367508.325995    7789 port.cc:153] oneDNN\nInside I0000 a line\n"
        b"To enable the following instructions: AVX2\nW0000 a warning\n\nI000"
    )
    written: list[bytes] = []
    notes = WithoutNotes(written.append)
    for start in range(0, len(said), size):
        notes(said[start : start + size])
    notes.close()
    assert b"".join(written) == b"a line\nInside I0000 a line\nW0000 a warning\n\nI000"


def test_a_line_without_end_passes_at_once() -> None:
    written: list[bytes] = []
    WithoutNotes(written.append)(b"50 %")
    assert written == [b"50 %"]


def test_the_tail_keeps_the_end() -> None:
    tail = Tail()
    for number in range(100_000):
        tail(b"%d\n" % number)
    tail(b"10 %\r100 %\n")
    assert tail.lines(2) == ["99999", "100 %"]
    assert len(tail.text()) < 100_000


def test_a_program_that_can_not_be_run_is_named() -> None:
    ended = subprocess.run(die_with_parent.wrap(["/no/such/program"]), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "keras-dist: can't run '/no/such/program': No such file or directory\n"


def test_a_rank_does_not_start_for_a_parent_that_is_gone() -> None:
    command = die_with_parent.wrap(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (137, "")


def test_an_error_that_all_ranks_raise_is_shown_once() -> None:
    """The tail of another rank is shown unless rank 0 has shown the same last lines."""
    outputs = [RankOutput(rank, CHIEF, None, Console()) for rank in range(2)]
    error = b"kd.MismatchError: wrong.\nReceived: that\nRemedy: this\n"
    outputs[1].tail(b"own line\n" + error)
    end = Ended(1, 1)
    assert describe(end, [end], outputs, 2).split("\n")[:2] == ["[1] own line", "[1] kd.MismatchError: wrong."]
    outputs[0].tail(b"another line\n" + error)
    assert describe(end, [end], outputs, 2).startswith("keras-dist: rank 1 exited with code 1.")
