"""All backends, in order of preference: the one place to add a backend.

An entry names classes by where they are, so that a backend is imported only when it is chosen.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist import environment
from keras_dist.comm.backend import Affinity, Backend
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is known of a backend without importing it. Classes are `"module:Class"`, relative to this package.

    Args:
        backend: The backend.
        cluster: How its processes are launched on this machine; `None` if the backend is a single process.
        on_cpus: Returns the options with which one process has n replicas on CPUs; `None` if it has one replica.
        emulation: A subclass that needs no accelerator, for tests.
    """

    backend: str
    cluster: str | None = None
    on_cpus: Callable[[int], Mapping[str, Any]] | None = None
    emulation: str | None = None

    @property
    def scales_on_cpus(self) -> bool:
        """True if there can be several ranks or replicas on a machine without accelerators."""
        return self.cluster is not None or self.on_cpus is not None


BACKENDS: dict[str, Entry] = {
    "horovod": Entry(".horovod.backend:Horovod", "..launcher.cluster:HorovodCluster"),
    "multi_worker": Entry(".multi_worker.backend:MultiWorker", "..launcher.cluster:MultiWorkerCluster"),
    "mirrored": Entry(".local.mirrored:Mirrored", on_cpus=lambda n: {"devices": _cpus(0, n)}),
    "central_storage": Entry(
        ".local.central_storage:CentralStorage", on_cpus=lambda n: {"compute_devices": _cpus(1, n)}
    ),
    "parameter_server": Entry(".parameter_server.backend:ParameterServer", "..launcher.cluster:ParameterServerCluster"),
    "tpu": Entry(".tpu.backend:TPU", on_cpus=lambda n: {"cores": n}, emulation=".tpu.emulated:EmulatedTPU"),
    "serial": Entry(".local.serial:Serial"),
}


def _cpus(first: int, count: int) -> list[str]:
    return [f"CPU:{index}" for index in range(first, first + count)]


def load(place: str) -> Any:
    """Returns the class at `"module:Class"`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module, __name__), name)


def find(name: str) -> Entry:
    """Returns the entry of a registered backend.

    Raises:
        ConfigurationError: If no backend has this name; the known ones are listed.
    """
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in ("auto", *BACKENDS))
        raise ConfigurationError("Unknown backend.", f"backend={name!r}", f"Use one of {known}.")
    return BACKENDS[name]


def backend_class(name: str) -> type[Backend]:
    """Returns the class of a registered backend."""
    cls: type[Backend] = load(find(name).backend)
    return cls


def choose(launch: Launch | None) -> tuple[type[Backend], Affinity]:
    """Returns the backend that `"auto"` is: the user's, or the one that fits the launch best; and why.

    Earlier ones win a tie.

    Raises:
        ConfigurationError: If the user names an unknown one.
    """
    if (forced := environment.get(environment.BACKEND)) is not None:
        return backend_class(forced), Affinity(1, f"chosen by {environment.BACKEND}")
    candidates = [(backend_class(name), backend_class(name).affinity(launch)) for name in BACKENDS]
    return max(candidates, key=lambda candidate: candidate[1].score)


__all__ = ["BACKENDS", "Affinity", "Backend", "Entry", "backend_class", "choose", "find", "load"]
