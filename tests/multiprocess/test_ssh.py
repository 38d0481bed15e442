"""`keras-dist run -H a:2,b:1` over a real sshd on each of two hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keras_dist import cli
from tests.limits import limit
from tests.multiprocess.hosts import ADDRESSES, two_hosts
from tests.multiprocess.launches import (
    CONTRACT_SECONDS,
    PREAMBLE,
    RUN,
    end,
    finished,
    found,
    last_line,
    popen,
    processes_marked,
    until,
)
from tests.multiprocess.test_nodes import TRAIN

SSHD = shutil.which("sshd", path="/usr/sbin")
BOTH = f"{ADDRESSES[0]}:2,root@{ADDRESSES[1]}:1"
pytestmark = pytest.mark.timeout(120)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Path]]:
    """Two hosts with an sshd, and the configuration of a client that may log in."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\n"
    )
    known = "".join(f"{address} {(folder / 'host.pub').read_text()}" for address in ADDRESSES)
    (folder / "known").write_text(known)
    (folder / "config").write_text(f"Host *\nIdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\n")
    names = [f"kds{os.getpid()}-{index}" for index in range(2)]
    os.makedirs("/run/sshd", exist_ok=True)
    with two_hosts(names, "127.0.0.1 localhost\n"):
        command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
        daemons = [
            subprocess.Popen(["ip", "netns", "exec", name, *command], stderr=subprocess.DEVNULL) for name in names
        ]

        def can_log_in() -> bool:
            login = ["ip", "netns", "exec", names[0], "ssh", "-F", str(folder / "config")]
            tried = [subprocess.run([*login, address, "true"], capture_output=True) for address in ADDRESSES]
            return not any(done.returncode for done in tried)

        try:
            until(can_log_in)
            yield names, folder / "config"
        finally:
            for daemon in daemons:
                daemon.terminate()
                daemon.wait(10)


@pytest.fixture
def launch(hosts: tuple[list[str], Path], tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher on the first host; afterwards looks for processes that it left behind."""
    names, config = hosts
    marker, started = f"KERAS_DIST_TEST_MARKER_{os.getpid()}_{time.monotonic_ns()}", []

    def start(source: str, *options: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(source if source == TRAIN else PREAMBLE + source)
        command = [*RUN, "--ssh", f"ssh -F {config}", *options, str(script)]
        started.append(popen(["ip", "netns", "exec", names[0], *command], tmp_path, marker, **{marker: "1"}))
        return started[-1]

    yield start
    with contextlib.suppress(AssertionError):
        until(lambda: not processes_marked(marker), limit(CONTRACT_SECONDS))
    end(marker, *started)


def test_ranks_on_two_hosts(launch: Start, tmp_path: Path) -> None:
    source = (
        "names = ('SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE', 'HOSTNAME', 'GLOO_IFACE')\n"
        "told = [os.environ['HOROVOD_' + name] for name in names]\n"
        "print(rank, *told, 'KERAS_DIST_SECRET' in os.environ, Path.cwd())\n"
    )
    code, out, err = finished(launch(source, "-H", BOTH, "--output", "all"))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[0] 0 3 0 2 0 2 {ADDRESSES[0]} eth0 False {tmp_path}",
        f"[1] 1 3 1 2 0 1 {ADDRESSES[0]} eth0 False {tmp_path}",
        f"[2] 2 3 0 1 1 2 {ADDRESSES[1]} eth0 False {tmp_path}",
    ]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_ranks_over_ssh_train_together(launch: Start) -> None:
    """That the numbers are those of one process, `test_nodes.py` shows: here only the start differs."""
    code, out, err = finished(launch(TRAIN, "-H", f"{ADDRESSES[0]}:1,{ADDRESSES[1]}:1"), 200)
    assert code == 0, err
    places, weights = found(out)
    assert places == [[0, 0, 1], [1, 0, 1]]
    assert [len(weight) for weight in weights] == [8, 16, 16, 1]


def test_a_rank_that_fails_ends_all(launch: Start) -> None:
    code, _, err = finished(launch("rank == 2 and sys.exit(7)\ntime.sleep(60)\n", "-H", BOTH))
    place = f"rank 2 on node 2 ({socket.gethostname()}, {ADDRESSES[1]})"
    assert code == 7
    assert last_line(err) == f"keras-dist: {place} exited with code 7. All ranks have ended."


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launcher_ends_all(launch: Start, tmp_path: Path, signum: signal.Signals) -> None:
    job = launch("mark(f'ready{rank}'); time.sleep(60)\n", "-H", BOTH)
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(3)))
    job.send_signal(signum)
    assert finished(job)[0] == (130 if signum == signal.SIGINT else -9)


def test_a_host_that_can_not_be_reached_is_named(launch: Start) -> None:
    code, _, err = finished(launch("time.sleep(60)\n", "-H", f"{ADDRESSES[0]}:1,nobody-here@{ADDRESSES[1]}:1"))
    assert code == 2
    assert f"The launcher on nobody-here@{ADDRESSES[1]} has ended before all have joined.\n" in err
    assert "Received: exit code 255 (255 is that of ssh itself)\n" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("-H a", "-H must be hosts with a number of ranks each."),
        ("-H=-oProxyCommand=x:1", "-H must be hosts with a number of ranks each."),
        ("-H a:1 -np 2", "-H names all ranks, of horovod or multi_worker."),
        ("-H a:1 --max-restarts 1", "--max-restarts needs rank 0 on this machine, to see its commits."),
        ("-H no-such-host.invalid:1", "The name of a host has no address"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, problem: str
) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main(["run", *options.split(), str(tmp_path / "train.py")]) == 2
    assert f"keras-dist run: {problem}" in capsys.readouterr().err
