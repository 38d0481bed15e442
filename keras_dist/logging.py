"""The library's logger: shows warnings unless KERAS_DIST_LOG asks for more, with the rank at the start of each line."""

from __future__ import annotations

import logging
import sys

from keras_dist import environment
from keras_dist.errors import ConfigurationError

_NAME = "keras_dist"
_LEVELS = ("debug", "info", "warning", "error")


def logger() -> logging.Logger:
    """Returns the logger of the library."""
    return logging.getLogger(_NAME)


def set_up(rank: int) -> None:
    """Sets the level and the prefix of the logger.

    Args:
        rank: Index of this process.

    Raises:
        ConfigurationError: If KERAS_DIST_LOG is no level.
    """
    level = (environment.get(environment.LOG_LEVEL) or "warning").lower()
    if level not in _LEVELS:
        known = ", ".join(_LEVELS)
        raise ConfigurationError("Unknown log level.", f"{environment.LOG_LEVEL}={level}", f"Use one of {known}.")
    log = logger()
    log.setLevel(level.upper())
    log.propagate = False
    for handler in list(log.handlers):
        log.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"keras_dist [{rank}] %(levelname)s: %(message)s"))
    log.addHandler(handler)
