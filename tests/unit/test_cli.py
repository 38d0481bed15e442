"""The command line: its help, its errors, and the parts of the launcher that need no process."""

from __future__ import annotations

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
from keras_dist.launcher.output import NOTES, Lines
from keras_dist.launcher.processes import Ended, exit_code, first_cause, lost_peer, named_failed
from tests.limits import limit

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not be started')\n")
    return path


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


@pytest.mark.parametrize("arguments", [["-np", "2", "x.py", "--a b"], ["x.py"], ["--workers", "2", "x.py"]])
def test_a_forgotten_run_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("keras-dist: The command is missing.\nReceived: keras-dist ")
    assert err.endswith(f"Remedy: Type `keras-dist run {shlex.join(arguments)}`.\n")


@pytest.mark.parametrize(
    ("arguments", "problem", "received"),
    [
        (["-np", "2"], "There is nothing to run.", "no script"),
        (["-np", "2", "nowhere.py"], "The script was not found.", "nowhere.py in "),
        (["-np", "2", "no-such-program"], "The program was not found.", "no-such-program"),
        (["-np", "0", "train.py"], "must be a positive integer", "-np 0"),
        (["train.py"], "The number of processes is missing.", "no -np"),
        (["train.py", "-np", "2"], "The number of processes is missing.", "-np after the script"),
        (["--backend", "mirrored", "-np", "2", "train.py"], "This backend can't be launched.", "backend='mirrored'"),
        (["-np", "2", "--max-restarts", "-1", "train.py"], "must be an integer from 0 on", "--max-restarts -1"),
        (["-np", "2", "--grace", "1min", "train.py"], "must be seconds, from 0 on", "--grace 1min"),
        (["-np", "2", "--log-dir", "train.py", "train.py"], "logs of the ranks can't be written", "train.py"),
    ],
)
def test_errors_say_the_problem_what_was_received_and_the_remedy(
    script: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str, received: str
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
    ended = [Ended(rank, code) for rank, code in enumerate(codes)]
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


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_tensorflow_says_at_its_start_is_left_out(size: int) -> None:
    said = (
        b"a line\nWARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
        b"I0000 00:00:1795367508.325995    7789 port.cc:153] oneDNN\nInside I0000 a line\n"
        b"To enable the following instructions: AVX2\nW0000 a warning\n\nI000"
    )
    written: list[bytes] = []
    notes = Lines(written.append, whole=False, notes=NOTES)
    for start in range(0, len(said), size):
        notes(said[start : start + size])
    notes.close()
    assert b"".join(written) == b"a line\nInside I0000 a line\nW0000 a warning\n\nI000"


def test_a_program_that_can_not_be_run_is_named() -> None:
    ended = subprocess.run(die_with_parent.wrap(["/no/such/program"]), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "keras-dist: can't run '/no/such/program': No such file or directory\n"


def test_a_rank_does_not_start_for_a_parent_that_is_gone() -> None:
    command = die_with_parent.wrap(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (137, "")
