"""The logs of a standing cluster: each process keeps its own, and the coordinator, usually a notebook, shows them."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from keras_dist.logging import announce

_LOOK_SECONDS = 0.2
_END_SECONDS = 2.0
_STDOUT, _STDERR = 1, 2


def log_of(path: str, name: str) -> Path:
    """Returns the log of a process, beside the file with the addresses of its cluster."""
    return Path(path).resolve().with_suffix(f".{name.replace(' ', '-')}.log")


def keep(log: Path) -> None:
    """Writes what this process prints into its log, too. Another process does, so that its last words are not lost."""
    with contextlib.suppress(OSError):  # there is no `tee`, or the log belongs to somebody else
        log.unlink(missing_ok=True)  # not emptied: who still reads it is to see that another one takes its place
        tee = subprocess.Popen(["tee", log], stdin=subprocess.PIPE, stdout=_STDERR)
        if tee.stdin is not None:  # for the type checker
            for descriptor in (_STDOUT, _STDERR):
                os.dup2(tee.stdin.fileno(), descriptor)
            tee.stdin.close()


def show(path: str, tasks: Mapping[str, str]) -> None:
    """Shows from now on what the processes of a cluster print, as far as their logs are on this machine.

    `tasks` are their addresses by name, which begins each line.
    """
    logs, elsewhere = [], []
    for name, address in tasks.items():
        try:
            logs.append(Log(name, log_of(path, name)))
        except OSError:
            elsewhere.append(f"{log_of(path, name).name} on {address.rpartition(':')[0]}")
    if elsewhere:
        announce(f"keras_dist: these logs are not on this machine, so they are not shown: {', '.join(elsewhere)}")
    has_ended = threading.Event()

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = has_ended.wait(_LOOK_SECONDS)
            if lines := [line for log in logs for line in log.new_lines()]:
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    sys.stderr.write("".join(lines))
                    sys.stderr.flush()

    thread = threading.Thread(target=follow, name="keras_dist-logs", daemon=True)
    thread.start()

    @atexit.register
    def end() -> None:
        has_ended.set()
        thread.join(_END_SECONDS)


class Log:
    """The lines that come into a log from now on, and into the one of a process that takes this one's place."""

    def __init__(self, name: str, path: Path) -> None:
        self._name, self._path = name, path
        self._file = path.open("rb")
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def new_lines(self) -> list[str]:
        successor = None
        with contextlib.suppress(OSError):  # there is none at this moment
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                successor = self._path.open("rb")
        text = self._rest + self._file.read()
        if successor is not None:
            self._file.close()
            self._file = successor
            if text and not text.endswith(b"\n"):
                text += b"\n"
            text += successor.read()
        *lines, self._rest = text.split(b"\n")
        return [f"[{self._name}] {line.decode(errors='replace')}\n" for line in lines]
