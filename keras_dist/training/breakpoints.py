"""`breakpoint()` with several ranks: only rank 0 has a terminal, so only rank 0 stops."""

from __future__ import annotations

import functools
import inspect
import pdb
import sys
from typing import Any

from keras_dist import environment
from keras_dist.errors import ConfigurationError
from keras_dist.logging import announce, logger
from keras_dist.topology import Topology

_IN_ONE_PROCESS = "`keras-dist run -np 1 train.py` debugs in one process"


def install(topology: Topology) -> None:
    """Makes `breakpoint()` stop rank 0 only, unless the script or the user has chosen another debugger."""
    is_pythons_own = sys.breakpointhook is sys.__breakpointhook__
    if topology.size > 1 and is_pythons_own and environment.get(environment.PYTHON_BREAKPOINT) is None:
        sys.breakpointhook = functools.partial(_stop, topology)


def _stop(topology: Topology, *args: Any, **kwargs: Any) -> None:
    if not topology.is_chief:
        logger().debug("breakpoint() is skipped: only rank 0 has a terminal")
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise ConfigurationError(
            "breakpoint() needs a terminal, and this rank has none.",
            f"breakpoint() on {topology}",
            f"{_IN_ONE_PROCESS}. In a terminal, rank 0 of `keras-dist run` stops too.",
        )
    announce(f"keras_dist: only rank 0 stops; the other ranks wait in their next common call. {_IN_ONE_PROCESS}.")
    frame = inspect.currentframe()
    pdb.Pdb().set_trace(frame and frame.f_back)
