"""Shows how far a build is: one updating line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TextIO

# As make and CMake print it: "[ 57%] Building CXX object ...".
STEP = re.compile(r"^\s*\[\s*(\d+)%\]", re.MULTILINE)

PLAIN_INTERVAL_S = 20.0


class Progress:
    """The line that tells how far a build is.

    Args:
        title: What is being built.
        stream: Where to write.
        clock: Gives the time in seconds.

    Example:

    >>> with Progress("Building Horovod", sys.stderr) as progress:
    ...     progress.update("[ 57%] Building CXX object a.o")
    Building Horovod:  57 %, 12 s
    """

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._percent: int | None = None
        self._live = stream.isatty()
        self._last_line = self._start
        self._rest = ""

    def update(self, output: str) -> None:
        """Takes what the build printed since the last call, and shows how far it is now.

        Args:
            output: New output, which may be empty or end within a line.
        """
        text = self._rest + output
        complete, newline, self._rest = text.rpartition("\n")
        if newline:
            # Two libraries are compiled at once, each with its own count: keep the larger.
            self._percent = max([self._percent or 0, *map(int, STEP.findall(complete))]) or self._percent
        if self._live:
            self._stream.write(f"\r\x1b[K{self._line()}")
        elif self._clock() - self._last_line >= PLAIN_INTERVAL_S:
            self._stream.write(self._line() + "\n")
            self._last_line = self._clock()
        self._stream.flush()

    def _line(self) -> str:
        done = "configuring" if self._percent is None else f"{self._percent:3d} %"
        return f"{self._title}: {done}, {self._clock() - self._start:.0f} s"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
