"""The only reader (and writer) of the process environment: what a launcher left for us.

Every launcher tells its ranks who they are by environment variables. One small class per launcher reads
them, in order of preference; nothing else in the library looks at `os.environ`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from keras_dist.errors import ConfigurationError
from keras_dist.topology import Topology

LOG_LEVEL = "KERAS_DIST_LOG"
BACKEND = "KERAS_DIST_BACKEND"
INITIALIZED_BY = "KERAS_DIST_INITIALIZED_BY"
JOIN_TIMEOUT = "KERAS_DIST_JOIN_TIMEOUT"


def current() -> dict[str, str]:
    """Returns a copy of the environment of this process."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """Returns one variable of the environment, or `default`."""
    return os.environ.get(name, default)


def set_defaults(values: Mapping[str, str]) -> None:
    """Sets the variables that the user has not set himself."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_values(values: Mapping[str, str]) -> None:
    """Sets variables, whatever was there."""
    os.environ.update(values)


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher told this process.

    Args:
        launcher: Name of the launcher, for messages.
        topology: The place of this process.
        rendezvous: Address and port of Horovod's key-value store, or `None` where the launcher has none (MPI).
    """

    launcher: str
    topology: Topology
    rendezvous: tuple[str, int] | None = None


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Returns what the launcher of this process left in the environment, `None` for plain `python`.

    Raises:
        ConfigurationError: If a launcher's variables are there but incomplete or not numbers.
    """
    environ = os.environ if environ is None else environ
    for read in (_gloo_launch, _openmpi_launch):
        launch = read(environ)
        if launch is not None:
            return launch
    return None


def _gloo_launch(environ: Mapping[str, str]) -> Launch | None:
    """`keras-dist run` and `horovodrun --gloo` both speak Horovod's own dialect."""
    if "HOROVOD_RANK" not in environ or "HOROVOD_SIZE" not in environ:
        return None
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    rendezvous = (address, _integer(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")) if address and port else None
    return Launch(
        launcher="keras-dist run" if environ.get("KERAS_DIST_LAUNCHER") else "horovodrun",
        topology=_topology(environ, "HOROVOD_"),
        rendezvous=rendezvous,
    )


def _openmpi_launch(environ: Mapping[str, str]) -> Launch | None:
    """`mpirun`, and `horovodrun --mpi`, which calls it."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    return Launch(launcher="mpirun", topology=_topology(environ, "OMPI_COMM_WORLD_"))


def _topology(environ: Mapping[str, str], prefix: str) -> Topology:
    return Topology(
        rank=_integer(environ, prefix + "RANK"),
        size=_integer(environ, prefix + "SIZE"),
        local_rank=_integer(environ, prefix + "LOCAL_RANK"),
        local_size=_integer(environ, prefix + "LOCAL_SIZE"),
    )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"The launcher's environment is incomplete: {name} must be an integer.",
            f"{name}={environ.get(name)!r}",
            "Start the script with `keras-dist run -np N train.py` or `horovodrun -np N python train.py`, "
            "or unset the HOROVOD_* variables that an earlier launch left behind.",
        ) from None
