"""The progress line of a command: what is being done, for how long, and about how long it takes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import TextIO

_UPDATE_SECONDS = 0.5
_PLAIN_SECONDS = 20.0  # between two lines where there is no terminal
_CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    """A line that is updated in place on a terminal; elsewhere a plain line at the start and every 20 seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._task = ""
        self._estimate = ""
        self._start = self._last = 0.0

    def start(self, task: str, seconds: float | None = None) -> None:
        """Starts to show a task, which takes about so many seconds."""
        self._task = task
        self._start = self._last = time.monotonic()
        self._estimate = f"about {_round(seconds)}" if seconds else ""
        if self._is_terminal:
            self.update()
        else:
            self._stream.write(", ".join(filter(None, [task, self._estimate])) + "\n")
            self._stream.flush()

    def update(self, done: str = "") -> None:
        """Shows the time so far, and how much is done, such as `"57 %"`."""
        now, of_about = time.monotonic(), f" of {self._estimate}" if self._estimate else ""
        progress = ", ".join(filter(None, [done, f"{now - self._start:.0f} s{of_about}"]))
        if self._is_terminal:
            self._stream.write(f"{_CLEAR_LINE}{self._task}: {progress}")
        elif now - self._last >= _PLAIN_SECONDS:
            self._stream.write(f"{self._task}: {progress}\n")
            self._last = now
        self._stream.flush()

    def wait(self, process: subprocess.Popen[bytes], done: Callable[[], str] = str) -> None:
        """Waits for the end of a process; `done` returns how much is done."""
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_UPDATE_SECONDS)
            self.update(done())

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Takes the line away, to print something else there."""
        if self._is_terminal:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return f"{round(seconds / 60)} min"
