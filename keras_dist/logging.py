"""The library's logger: shows warnings unless KERAS_DIST_LOG asks for more, with the rank at the start of each line."""

import contextlib
import fcntl
import functools
import logging
import sys
import termios
import time
from collections.abc import Iterator

from keras_dist import environment
from keras_dist.errors import ConfigurationError

_READ_SECONDS = 0.2
_POLL_SECONDS = 0.001
_LEVELS = ("debug", "info", "warning", "error")


def logger() -> logging.Logger:
    return logging.getLogger("keras_dist")


@contextlib.contextmanager
def without_notes_of_tensorflow(least: int = logging.WARNING) -> Iterator[None]:
    """Hides what TensorFlow tells about strategies, such as "Reduce to ...", unless the user asks for our own log."""
    tensorflow = logging.getLogger("tensorflow")
    level = tensorflow.level
    if not logger().isEnabledFor(logging.INFO):
        tensorflow.setLevel(max(level, least))
    try:
        yield
    finally:
        tensorflow.setLevel(level)


def announce(line: str) -> None:
    """Prints a line that the script's own output can't break: in one piece, and before the script continues.

    `keras-dist run` passes our stderr on, while rank 0 writes its stdout to the terminal itself.
    """
    sys.stdout.flush()
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    deadline = time.monotonic() + _READ_SECONDS
    with contextlib.suppress(OSError, ValueError):  # no pipe, or no real file at all (a notebook)
        # As long as bytes in the pipe are unread: FIONREAD returns their number.
        while any(fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, bytes(4))) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def set_up(rank: int) -> None:
    level = (environment.get(environment.LOG_LEVEL) or "warning").lower()
    if level not in _LEVELS:
        remedy = f"Use one of {', '.join(_LEVELS)}."
        raise ConfigurationError("Unknown log level.", f"{environment.LOG_LEVEL}={level}", remedy)
    log = logger()
    log.setLevel(level.upper())
    log.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"keras_dist [{rank}] %(levelname)s: %(message)s"))
    log.handlers = [handler]


announce_once = functools.cache(announce)


@functools.cache
def warn_once(text: str, *args: object) -> None:
    logger().warning(text, *args)
