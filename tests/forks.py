"""Starts processes, and the ranks of pools, that have TensorFlow already: for tests whose subject is not the start."""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from keras_dist import testing

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240.0  # for a whole run on a busy machine
POLL_SECONDS = 0.05
_ENVIRON = {
    "TF_CPP_MIN_LOG_LEVEL": "3", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2",
    "OPENBLAS_NUM_THREADS": "1",  # so that the process that forks has one thread
}  # fmt: skip


class ForkServer:
    """Imports TensorFlow when it is first needed, and forks from then on."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()

    def start(self, command: Sequence[str], environ: dict[str, str], folder: Path, output: Path, errors: Path) -> int:
        """Starts a script, and returns the number of its process."""
        order = {"folder": str(folder), "output": str(output), "errors": str(errors)}
        return int(self._ask(run=[*command], environ={**os.environ, **_ENVIRON, **environ}, **order))

    def exit_code(self, pid: int) -> int | None:
        """Returns how a process has ended, `None` if it still runs."""
        return self._ask(ended=pid)

    def wait(self, pid: int, timeout: float = SECONDS) -> int:
        """Returns how a process has ended, when it has."""
        deadline = time.monotonic() + timeout
        while (code := self.exit_code(pid)) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {pid}", timeout)
            time.sleep(POLL_SECONDS)
        return code

    def run(self, program: str, folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a program as `python -c` would, in a folder where it leaves files of its text and of what it printed."""
        number = next(n for n in itertools.count() if not (folder / f"program{n}.py").exists())
        script, output, errors = (folder / f"program{number}.{kind}" for kind in ("py", "out", "err"))
        script.write_text(program)
        code = self.wait(self.start([str(script), *arguments], environ, folder, output, errors))
        return subprocess.CompletedProcess([str(script), *arguments], code, output.read_text(), errors.read_text())

    def _ask(self, **order: Any) -> Any:
        if self._process is None:
            command = [sys.executable, str(ROOT / "tests/fork_server.py")]
            environ = {**os.environ, **_ENVIRON}
            self._process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        number = next(self._numbers)
        self._process.stdin.write(json.dumps({**order, "number": number}) + "\n")
        self._process.stdin.flush()
        answer = {"number": None}
        while answer["number"] != number:  # a test that ran out of time may have left an answer
            answer = json.loads(self._process.stdout.readline())
        return answer["answer"]

    def pids(self) -> set[int]:
        return set() if self._process is None else {self._process.pid}

    def close(self) -> None:
        """Ends what it has started, and itself."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


class ForkedPool(testing.WorkerPool):
    """A `WorkerPool` whose ranks are forked, each with as many devices as it has `replicas`."""

    def __init__(
        self, forks: ForkServer, n: int, backend: str, environ: Mapping[str, str], replicas: int = 1
    ) -> None:
        super().__init__(n, backend, environ=environ)
        self._forks = forks
        if replicas > 1:
            options = {"devices": [f"CPU:{index}" for index in range(replicas)]}
            self._serve_arguments = backend, options, replicas

    def _worker(self, rank: int, serve_arguments: Sequence[Any], environ: Mapping[str, str]) -> testing._Worker:
        return _ForkedWorker(self._forks, rank, serve_arguments, environ)


class _ForkedWorker(testing._Worker):
    """A rank, which connects to a socket: a process that somebody else forks inherits no pipe."""

    def __init__(
        self, forks: ForkServer, rank: int, serve_arguments: Sequence[Any], environ: Mapping[str, str]
    ) -> None:
        self.rank = rank
        with tempfile.TemporaryDirectory(prefix="keras_dist-rank-") as name:
            folder = Path(name)
            program, output, address = folder / "rank.py", folder / "output", folder / "socket"
            program.write_text(_RANK.format(address=str(address), arguments=", ".join(map(repr, serve_arguments))))
            output.touch()
            self._output = output.open("rb")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen()
                listener.settimeout(SECONDS)
                pid = forks.start([str(program)], dict(environ), Path.cwd(), output, output)
                self.process = _Forked(forks, pid)  # type: ignore[assignment]
                self.connection = connection.Connection(listener.accept()[0].detach())


_RANK = """
import socket
from keras_dist.testing import _serve
del __file__  # as in `python -c`: a process that is spawned here looks for no main module
parent = socket.socket(socket.AF_UNIX)
parent.connect({address!r})
_serve(parent.detach(), {arguments})
"""


class _Forked:
    """What a `subprocess.Popen` is, of a process that the fork server has started."""

    def __init__(self, forks: ForkServer, pid: int) -> None:
        self._forks, self.pid = forks, pid

    def poll(self) -> int | None:
        return self._forks.exit_code(self.pid)

    def wait(self, timeout: float = SECONDS) -> int:
        return self._forks.wait(self.pid, timeout)
