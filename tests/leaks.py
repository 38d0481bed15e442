"""Finds what a test has left behind: processes, listening ports, threads, temporary files."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_GRACE_SECONDS = 30.0  # for what is about to end: only a leak takes so long
_TENSORFLOWS_OWN = "__autograph_generated_file"  # gone when the process ends, but for their compiled form:
_PYTHONS_OWN = "__pycache__"
_TFDS_OWN = "tfds"  # how the names of folders end that TFDS never removes (core/dataset_info.py, `mkdtemp("tfds")`)


class LeftBehind:
    """Remembers what is there before a test: the processes with a mark in their environment, the ranks' files."""

    def __init__(self, variable: str, value: str, temporary: Path, allowed_pids: Callable[[], set[int]]) -> None:
        self._mark = variable, value
        self._temporary = temporary
        self._allowed_pids = allowed_pids
        self._before = self._now()

    def check(self) -> None:
        """Fails if there is more than before."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while (new := self._now() - self._before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not new, f"left behind: {', '.join(sorted(new))}"

    def _now(self) -> set[str]:
        return self._processes() | self._files() | _threads() | _own_ports()

    def _processes(self) -> set[str]:
        allowed, (variable, value) = self._allowed_pids() | {os.getpid()}, self._mark
        found = set()
        for process in psutil.process_iter(["ppid", "environ", "cmdline"]):
            is_ours = process.info["ppid"] == os.getpid() or (process.info["environ"] or {}).get(variable) == value
            if is_ours and process.pid not in allowed:
                command = " ".join(process.info["cmdline"] or [])[:80]
                found.add(f"process {process.pid} ({command or 'ended, not waited for'})")
        return found

    def _files(self) -> set[str]:
        files = self._temporary.rglob("*")
        return {f"temporary file {path}" for path in files if not is_known(path.relative_to(self._temporary))}


def marked(variable: str, value: str) -> set[int]:
    """Returns the processes that run and have inherited a variable with this value."""
    found = psutil.process_iter(["environ"])
    return {process.pid for process in found if (process.info["environ"] or {}).get(variable) == value}


def is_known(path: Path) -> bool:
    """True for what TensorFlow, Python or TFDS leave, and not we."""
    return path.name.startswith(_TENSORFLOWS_OWN) or path.name == _PYTHONS_OWN or path.parts[0].endswith(_TFDS_OWN)


def _threads() -> set[str]:
    """The rendezvous of a live pool is part of it."""
    names = {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate()}
    return {name for name in names if "keras_dist-rendezvous" not in name}


def _own_ports() -> set[str]:
    """Ports on which this process listens, but for one rendezvous a live pool. TensorFlow's servers never stop."""
    connections = psutil.Process().net_connections("tcp")
    ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    served = sum("keras_dist-rendezvous" in thread.name for thread in threading.enumerate())
    return {f"{number + 1} listening ports" for number in range(len(ports) - served)}
