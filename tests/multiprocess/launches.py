"""Commands of the tests, run to their end or watched; and hosts for them, which only root can make."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.leaks import marked

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = ROOT / "examples"
KERAS_DIST = [sys.executable, "-m", "keras_dist"]
RUN = [*KERAS_DIST, "run"]
HOROVODRUN = Path(sys.executable).with_name("horovodrun")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
SERIAL_LINE = "keras_dist: serial (CPU; no launcher found; to use more processes: keras-dist run -np N script.py)"
FOLDER = "KERAS_DIST_TEST_FOLDER"  # of the test that has started a process
CONTRACT_SECONDS = 5.0  # within which all ranks have ended after one fails; a test allows `limit` of it
START_SECONDS = 60.0  # for a condition, on a busy machine
RUN_SECONDS = 200.0  # for a whole run, on a busy machine

# The start of every script below. `mark` tells the test when the rank reached a point; all processes of a machine
# share the monotonic clock.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
if "TF_CONFIG" in os.environ:
    config = json.loads(os.environ["TF_CONFIG"])
    tasks = [(job, index) for job, addresses in config["cluster"].items() for index in range(len(addresses))]
    rank = tasks.index((config["task"]["type"], config["task"]["index"]))
else:
    rank = int(os.environ["HOROVOD_RANK"])
here = Path(__file__).parent

def mark(name):
    (here / f"{name}.part{rank}").write_text(str(time.monotonic()))
    (here / f"{name}.part{rank}").rename(here / name)

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def fail_by(action):
    mark("failed")
    action()
"""

# The start of a script that trains. One process has the same numbers.
SMALL_MODEL = """
import keras, numpy as np
import keras_dist as kd
keras.utils.set_random_seed(0)
kd.init()
keras.backend.set_floatx("float64")
x = np.random.default_rng(0).normal(size=(50, 8))
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
model = kd.distribute(model)
model.compile(keras.optimizers.Adam(0.01), "mse")
"""
# What a script of several hosts trains. The chief prints where the ranks are, and the weights.
TRAIN = f"""
import json, sys
{SMALL_MODEL}
print("trains", flush=True)
model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
from keras_dist.cluster import current_backend
place = current_backend().topology
told = current_backend().all_gather_object("places", [place.rank, place.local_rank, place.local_size])
if kd.is_chief():
    print("found:", json.dumps([told, [weight.tolist() for weight in model.get_weights()]]))
"""


def run(
    *command: str | Path, folder: Path | None = None, seconds: float = RUN_SECONDS, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [*map(str, command)], cwd=folder, env={**os.environ, **QUIET, **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip


def output_of(*command: str | Path, folder: Path | None = None, **variables: str) -> str:
    """Returns what a command prints, which ends well."""
    done = run(*command, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def logs_of(folder: Path) -> list[str]:
    """Returns the logs of two ranks that `--log-dir logs` has kept."""
    return [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]


def found(output: str) -> Any:
    """Returns what a script has printed as JSON after `found:`."""
    return json.loads(next(line for line in output.splitlines() if line.startswith("found:"))[len("found:") :])


def assert_close(actual: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """Compares numbers, in lists and dicts of the same form too."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(actual[name], value, rtol, atol)
    elif isinstance(expected, list):
        for own, value in zip(actual, expected, strict=True):
            assert_close(own, value, rtol, atol)
    else:
        np.testing.assert_allclose(actual, expected, rtol, atol)


def seconds_since(file: Path) -> float:
    """Returns the time since a script has written the monotonic clock into a file."""
    return time.monotonic() - float(file.read_text())


def finished(process: subprocess.Popen[str], seconds: float = START_SECONDS) -> tuple[int, str, str]:
    """Returns the exit code of a process, stdout and stderr, when it has ended."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def last_line(text: str) -> str:
    return text.rstrip("\n").split("\n")[-1]


def until(condition: Callable[[], bool], seconds: float = START_SECONDS, every: float = 0.01) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(every)


def wait_for(folder: Path, *names: str) -> None:
    """Waits until the ranks have made these marks."""
    until(lambda: all((folder / name).exists() for name in names))


def processes_of(folder: Path) -> set[int]:
    """Returns the processes that a test with this folder has started and that still run, also in other sessions."""
    return marked(FOLDER, str(folder))


@dataclasses.dataclass
class Job:
    """A running launcher, and what a test may ask of it."""

    folder: Path
    process: subprocess.Popen[str]

    def finish(self, seconds: float = START_SECONDS) -> tuple[int, str, str]:
        """Returns its exit code, stdout and stderr."""
        return finished(self.process, seconds)

    def signal(self, signum: signal.Signals, *marks: str) -> None:
        """Sends a signal to the launcher, once the ranks have made these marks."""
        wait_for(self.folder, *marks)
        self.process.send_signal(signum)

    def seconds_since(self, name: str) -> float:
        """Returns the time since a mark was made."""
        return seconds_since(self.folder / name)

    def processes(self) -> set[int]:
        return processes_of(self.folder)


Start = Callable[..., Job]
Commands = Callable[..., subprocess.Popen[str]]

# Hosts: network namespaces with a switch between them, and names of their own.
NETWORK = "10.77.9"
ADDRESSES = (f"{NETWORK}.1", f"{NETWORK}.2")
NETNS = Path("/etc/netns")  # what is in the folder of a namespace stands there for the same file in /etc
_ENTER = """
hostname "$0" && for file in "$1"/*; do mount --bind "$file" "/etc/${file##*/}" || exit; done && shift && exec "$@"
"""
# `{name}` is the name of the host itself, `{other}` the line of the other one.
ETC_HOSTS = {
    "debian": "127.0.0.1 localhost\n127.0.1.1 {name}\n{other}\n",
    "red hat": "127.0.0.1 localhost\n",
    "lan": "127.0.0.1 localhost\n{own}\n{other}\n",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(host: str, *command: str) -> tuple[str, ...]:
    """Returns the command that runs on one of two hosts. It is that process itself, to which signals can be sent.

    Unlike in `ip netns exec`, the host has its own name, and the control groups are seen, which slurmd needs.
    """
    enter = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount"]
    return (*enter, "sh", "-c", _ENTER, host, str(NETNS / host), *command)


@contextlib.contextmanager
def hosts_of(
    names: Sequence[str], etc_hosts: str, interfaces: Sequence[str] = (), has_docker: bool = False
) -> Iterator[None]:
    """Makes namespaces, as many as there are names, with this /etc/hosts, and removes them. Skips where it may not.

    If the hosts have Docker, all have a bridge `docker0` of the same address.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root, with `ip` (Debian: iproute2), can make network namespaces")
    switch, interfaces = f"{names[0]}-switch", interfaces or ["eth0"] * len(names)
    lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, 1)]
    try:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system lets nobody make network namespaces: {error.stderr.decode().strip()}")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, (name, interface, own) in enumerate(zip(names, interfaces, lines, strict=True), 1):
            (NETNS / name).mkdir(parents=True)
            others = "\n".join(line for line in lines if line != own)
            (NETNS / name / "hosts").write_text(etc_hosts.format(name=name, own=own, other=others))
            ip("-n", name, "link", "add", interface, "type", "veth", "peer", "name", f"to{number}", "netns", switch)
            ip("-n", switch, "link", "set", f"to{number}", "up", "master", "switch")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", interface)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", interface, "up")
            if has_docker:
                ip("-n", name, "link", "add", "docker0", "type", "bridge")
                ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
                ip("-n", name, "link", "set", "docker0", "up")
        yield
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        if NETNS.is_dir() and not any(NETNS.iterdir()):
            NETNS.rmdir()


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mounts a disk of its own, which can be filled. Skips the test where this is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
