"""One line that tells what is waited for, how long already, and about how long it takes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import TextIO

_TICK_SECONDS = 0.5
_PLAIN_SECONDS = 20.0


class Waiting:
    """The line: updated in place on a terminal; elsewhere a plain line at the start and now and then.

    Args:
        stream: Where to write.
        clock: Gives the time in seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._live = stream.isatty()
        self._what = ""
        self._about = ""
        self._start = self._last = clock()

    def begin(self, what: str, seconds: float | None = None) -> None:
        """Says what is done from now on.

        Args:
            what: In words.
            seconds: About how long it takes.
        """
        self._what, self._start = what, self._clock()
        self._about = f" of about {_round(seconds)}" if seconds else ""
        self._last = self._start
        self._stream.write(f"\r\x1b[K{self._line()}" if self._live else f"{what}{self._about.replace(' of', ',')}\n")
        self._stream.flush()

    def tick(self) -> None:
        """Shows how long it has taken."""
        if self._live:
            self._stream.write(f"\r\x1b[K{self._line()}")
        elif self._clock() - self._last >= _PLAIN_SECONDS:
            self._stream.write(self._line() + "\n")
            self._last = self._clock()
        self._stream.flush()

    def until(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the end of a process."""
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK_SECONDS)
            self.tick()

    def _line(self) -> str:
        return f"{self._what}: {self._clock() - self._start:.0f} s{self._about}"

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _round(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} s"
    return f"{round(seconds / 60)} min"
