"""The progress line of a command: what is being done, for how long, and about how long it takes."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Self, TextIO

_UPDATE_SECONDS = 0.5
_PLAIN_SECONDS = 20.0  # between two lines where there is no terminal
_CLEAR_LINE = "\r\x1b[K"


class ProgressLine:
    """A line that is updated in place on a terminal; elsewhere a plain line at the start and every 20 seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._task = self._estimate = ""
        self._start = self._last = 0.0

    def start(self, task: str, seconds: float = 0.0) -> None:
        """Starts to show a task, which takes about so many seconds, if that is known."""
        rounded = f"{max(5, round(seconds / 5) * 5)} s" if seconds < 90 else f"{round(seconds / 60)} min"
        self._task, self._estimate = task, f"about {rounded}" if seconds else ""
        self._start = self._last = time.monotonic()
        if self._is_terminal:
            self.update()
        else:
            self._show(", ".join(filter(None, [task, self._estimate])) + "\n")

    def update(self, done: str = "") -> None:
        """Shows the time so far, and how much is done, such as `"57 %"`."""
        now, of_about = time.monotonic(), f" of {self._estimate}" if self._estimate else ""
        progress = ", ".join(filter(None, [done, f"{now - self._start:.0f} s{of_about}"]))
        if self._is_terminal:
            self._show(f"{_CLEAR_LINE}{self._task}: {progress}")
        elif now - self._last >= _PLAIN_SECONDS:
            self._show(f"{self._task}: {progress}\n")
            self._last = now

    def wait(self, process: subprocess.Popen[bytes], done: Callable[[], str] = str) -> None:
        """Waits for the end of a process; `done` returns how much is done."""
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_UPDATE_SECONDS)
            self.update(done())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Takes the line away, to print something else there."""
        if self._is_terminal:
            self._show(_CLEAR_LINE)

    def _show(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
