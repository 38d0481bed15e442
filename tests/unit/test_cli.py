"""The command line: help, errors, `env`, the parts of the launcher that need no process; the wheel that has it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import keras_dist as kd
from keras_dist import cli, environment
from keras_dist.diagnostics import env
from keras_dist.launcher.job import exit_code, first_cause, lost_peer, named_failed
from keras_dist.launcher.output import NOTES, Lines
from keras_dist.launcher.processes import Ended, dying_with_parent

pytestmark = pytest.mark.timeout(120)


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
    for name, (summary, _) in cli.COMMANDS.items():
        assert name in out
        assert summary in out
    assert "kd.init()" in out
    assert "kd.distribute(model)" in out
    assert "keras-dist run -np 2 train.py" in out


@pytest.mark.parametrize("arguments", [["-np", "2", "x.py", "--a b"], ["x.py"], ["--workers", "2", "x.py"]])
def test_a_forgotten_run_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("keras-dist: The command is missing.\nReceived: keras-dist ")
    assert err.endswith(f"Remedy: Type `keras-dist run {shlex.join(arguments)}`.\n")


# The command line, the problem, what was received.
REFUSED = [
    ("run -np 2", "There is nothing to run.", "no script"),
    ("run -np 2 nowhere.py", "The script was not found.", "nowhere.py in "),
    ("run -np 2 no-such-program", "The program was not found.", "no-such-program"),
    ("run -np 0 train.py", "The number after -np must be a positive integer.", "-np 0"),
    ("run train.py", "The number of processes is missing.", "no -np"),
    ("run train.py -np 2", "The number of processes is missing.", "-np after the script"),
    ("run --backend mirrored -np 2 train.py", "This backend can't be launched.", "backend='mirrored'"),
    ("run -np 2 --max-restarts -1 train.py", "must be an integer from 0 on", "--max-restarts -1"),
    ("run -np 2 --grace 1min train.py", "must be a number of seconds, 0 or more", "--grace 1min"),
    ("run -np 2 --log-dir train.py train.py", "The logs of the ranks can't be written", "--log-dir train.py"),
    ("run --nnodes 2 train.py", "Several nodes also need --node-rank, --rendezvous.", "--nnodes 2"),
    ("run --interface eth0 train.py", "Several nodes also need --nnodes, --node-rank, --rendezvous.", "--interface"),
    ("run --nnodes 2 --node-rank 2 --rendezvous a:1 train.py", "--node-rank must be an index, from 0 to --nnodes - 1.",
     "--nnodes 2 --node-rank 2 --rendezvous a:1"),
    ("run --nnodes 2 --node-rank 0 --rendezvous a train.py", "--rendezvous must be the host of node 0, and a port.",
     "--nnodes 2 --node-rank 0 --rendezvous a"),
    ("run --nnodes 2 --node-rank 0 --rendezvous [::1]:1 train.py", "Addresses are IPv4.",
     "--nnodes 2 --node-rank 0 --rendezvous [::1]:1"),
    ("run --nnodes 0 --node-rank 0 --rendezvous a:1 train.py", "The number after --nnodes must be a positive integer.",
     "--nnodes 0"),
    ("run --nnodes 2 --node-rank 0 --rendezvous a:1 --workers 2 --serve train.py",
     "--serve starts a cluster on one machine only.", "--serve"),
    ("run --nnodes 5 --node-rank 0 --rendezvous a:1 --workers 2 train.py", "There are more nodes than processes.",
     "4 processes on 5 nodes"),
    ("run -H a:2,b:1 --workers 2 --serve train.py", "--serve starts a cluster on one machine only.", "--serve"),
    ("run --nnodes 2 --node-rank 0 --rendezvous a:1 -np 2 --backend parameter_server train.py",
     "Parameter servers need --workers, and optionally --ps, instead of -np.",
     "--workers None, --ps None, -np 2"),
    ("run --nnodes 2 --node-rank 0 --rendezvous 127.0.0.1:1 train.py", "The number of processes is missing.", "no -np"),
    ("run --nnodes 2 --node-rank 0 --rendezvous 192.0.2.1:1 -np 1 train.py",
     "Launchers on several machines need a secret", "--rendezvous 192.0.2.1:1 and KERAS_DIST_SECRET not set"),
    ("run -H a train.py", "-H must be hosts with a number of ranks each.", "-H a"),
    ("run -H=-oProxyCommand=x:1 train.py", "-H must be hosts with a number of ranks each.", "-H -oProxyCommand=x:1"),
    ("run -H a:1 -np 2 train.py", "-H already sets the number of processes of each host.", "-H a:1 with -np"),
    ("run -H a:1 --max-restarts 1 train.py", "--max-restarts needs rank 0 on this machine, to see its commits.",
     "-H a:1 --max-restarts 1"),
    ("run -H no-such-host.invalid:1 train.py", "The name of a host has no address", "no-such-host.invalid: "),
    ("selftest train.py", "keras-dist selftest runs no script.", "train.py"),
    ("selftest --workers 2", "keras-dist selftest tests ranks, and parameter servers have none.", "--workers"),
    ("selftest --backend parameter_server", "parameter servers have none.", "--backend parameter_server"),
    ("dry-run nowhere.py --target v5e-8", "The script was not found.", "nowhere.py"),
    ("dry-run train.py --target v5e-9", "Unknown TPU.", "target='v5e-9'"),
    ("dry-run train.py --target v5e-8 --batch 0", "--batch must be at least 1.", "--batch 0"),
    ("dry-run train.py --target v5e-8 --search-seconds -1", "--search-seconds must be at least 0.",
     "--search-seconds -1"),
    ("kube --image i", "There is nothing to run.", "no script"),
    ("kube --image i --name My_Job train.py", "The name can't be that of a Service and of pods.", "--name My_Job"),
    ("kube --image i --workers 0 train.py", "--workers is at least 1.", "--workers 0"),
    ("kube --image i --ps 1 -np 2 train.py", "Parameter servers have no ranks: each of their pods is one process.",
     "--ps 1, -np 2, --backend auto"),
    ("kube --image i --max-restarts -1 train.py", "--max-restarts is at least 0.", "--max-restarts -1"),
    ("kube --image i --claim data train.py", "--claim names a PersistentVolumeClaim and where it is mounted.", "data"),
]  # fmt: skip


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(("line", "problem", "received"), REFUSED)
def test_errors_say_the_problem_what_was_received_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, problem: str, received: str
) -> None:
    monkeypatch.delenv("KERAS_DIST_SECRET", raising=False)
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert first.startswith(f"keras-dist {line.split()[0]}: ")
    assert problem in first
    assert second.startswith(f"Received: {received}")
    assert third.startswith("Remedy: ")


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
    ended = subprocess.run(dying_with_parent(["/no/such/program"]), capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "keras-dist: can't run '/no/such/program': No such file or directory\n"


def test_a_rank_does_not_start_for_a_parent_that_is_gone() -> None:
    command = dying_with_parent(["echo", "started"])
    command[command.index(str(os.getpid()))] = "1"
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (137, "")


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The facts of a process without a launcher, found once: the probe imports TensorFlow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in environment.launcher_variables():
            patch.delenv(name)
        return env.describe()


def test_both_forms_have_the_same_facts(
    plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env, "describe", lambda: plain)
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == plain
    assert cli.main(["env"]) == 0
    shown = dict(re.split(r": +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["keras_dist"] == plain["keras_dist"]
    assert shown["packages keras"] == plain["packages"]["keras"]
    assert shown["horovod gloo"] == "yes"
    assert shown["backend reason"] == plain["backend"]["reason"]
    assert shown["network lo"].startswith("address 127.0.0.1, state ")
    assert {name.partition(" ")[0] for name in shown} == {*plain}


def test_the_documented_keys_are_those_that_there_are(plain: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(plain)


def test_a_rank(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_probe", lambda: {**plain, "backend": env._backend()})  # the other facts stay the same
    variables = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "SECRET_KEY": "x"}
    for name, value in variables.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    facts = env.describe()
    assert facts["launcher"] == {"name": "horovodrun", "rank": 1, "size": 4, "local_rank": 1, "local_size": 2}
    assert facts["backend"] == {"name": "horovod", "reason": "started by horovodrun"}
    of_horovod = {name: value for name, value in facts["variables"].items() if name.startswith("HOROVOD_")}
    assert of_horovod == {f"HOROVOD_{name}": value for name, value in variables.items() if name != "SECRET_KEY"}


def test_what_is_broken_is_a_fact_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("HOROVOD_RANK", "one")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    facts = env.describe()
    error = {
        "error": "TensorFlow or Keras can't be imported (exit code 1: ImportError: libcudart.so.12: cannot open shared "
        "object file)"
    }
    assert (facts["backend"], facts["horovod"]) == (error, error)
    assert "HOROVOD_RANK must be an integer. Received: HOROVOD_RANK='one'" in facts["launcher"]["error"]


# --- The wheel that `make dist` builds from its source distribution ---

SOURCES = ("keras_dist", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    # With the setuptools of this environment, so that the test needs no network.
    run(folder, "-c", "from setuptools import build_meta; build_meta.build_sdist('source')")
    (source,) = (folder / "source").iterdir()
    pip = ("-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation")
    run(folder, *pip, "--wheel-dir", "dist", str(source))
    (wheel,) = (folder / "dist").iterdir()
    return wheel


def run(folder: Path, *command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_has_all_files_of_the_package(wheel: Path) -> None:
    sources = {path.relative_to(ROOT) for path in (ROOT / "keras_dist").rglob("*") if path.is_file()}
    ours = {path for path in sources if "__pycache__" not in path.parts and path.suffix != ".in"}  # of `make lock`
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("keras_dist/")}
    assert packed == set(map(str, ours))


def test_its_command_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
        (entry_points,) = (name for name in files.namelist() if name.endswith("entry_points.txt"))
        assert "keras-dist = keras_dist.cli:main" in files.read(entry_points).decode()
    command = "import keras_dist; from keras_dist.cli import main; print(keras_dist.__file__); main(['--version'])"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [str(tmp_path / "keras_dist" / "__init__.py"), f"keras-dist {kd.__version__}"]
