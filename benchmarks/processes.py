"""Processes that run one function after another, like a `keras_dist.testing.WorkerPool`, but without keras_dist."""

import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, Self

from keras_dist.launcher.processes import signal_session, start_process

FOLDER = Path(__file__).resolve().parent
START_SECONDS = 180.0


class Processes:
    """Live processes on this machine, which end with this one.

    Args:
        environments: The whole environment of each.
        start: What each does first: the name of a module that has a function `start`, if any.
        close: Called when they have ended.
        prefix: What comes before the command of each, as `["ip", "netns", "exec", "name"]`.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        start: str | None = None,
        close: Callable[[], None] = lambda: None,
        prefix: Sequence[Sequence[str]] = (),
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[connection.Connection] = []
        self._outputs = [tempfile.TemporaryFile() for _ in environments]  # noqa: SIM115 - open while they live
        self._close = close
        for rank, environ in enumerate(environments):
            ours, theirs = connection.Pipe()
            program = f"from processes import serve; serve({theirs.fileno()}, {start!r})"
            path = os.pathsep.join(filter(None, [str(FOLDER), environ.get("PYTHONPATH")]))
            process = start_process(
                [*(prefix[rank] if prefix else ()), sys.executable, "-c", program],
                {**environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=self._outputs[rank],
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self._answers(START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
        """Runs a function that they can import on all processes, and returns what each returned."""
        for each in self._connections:
            each.send((function, args))
        return self._answers(timeout)

    def _answers(self, seconds: float) -> list[Any]:
        answers = []
        for rank, each in enumerate(self._connections):
            if not each.poll(seconds):
                raise RuntimeError(f"Process {rank} did not answer within {seconds:g} s.\n{self._last_output(rank)}")
            try:
                succeeded, answer = each.recv()
            except EOFError:
                raise RuntimeError(f"Process {rank} ended.\n{self._last_output(rank)}") from None
            if not succeeded:
                raise RuntimeError(f"Process {rank} raised.\n{answer}")
            answers.append(answer)
        return answers

    def _last_output(self, rank: int) -> str:
        output = self._outputs[rank]
        output.seek(0)
        return output.read()[-4000:].decode(errors="replace")

    def close(self) -> None:
        for process, each, output in zip(self._processes, self._connections, self._outputs, strict=False):
            signal_session(process, signal.SIGKILL)
            process.wait()
            each.close()
            output.close()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def serve(descriptor: int, start: str | None) -> None:
    """Runs the functions that arrive through a connection: the program of a process."""
    import importlib

    parent = connection.Connection(descriptor)
    work: tuple[Callable[..., Any], tuple[Any, ...]] = (lambda: start and importlib.import_module(start).start(), ())
    while True:
        try:
            function, args = work
            answer = True, function(*args)
        except Exception:
            answer = False, traceback.format_exc()
        parent.send(answer)
        try:
            work = parent.recv()
        except EOFError:  # the parent has ended
            return
