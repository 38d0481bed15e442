"""All backends, in order of preference: the one place to add a backend.

An entry names classes by where they are, so that a backend is imported only when it is chosen.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from keras_dist import environment
from keras_dist.comm.backend import Backend, Priority
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Entry:
    """What is known of a backend without importing it. Classes are `"module:Class"`, relative to this package."""

    backend: str
    cluster: str | None = None  # launches its processes on this machine; `None` if the backend is a single process
    # Returns the options with which one process has n replicas on CPUs; `None` if it has one replica.
    on_cpus: Callable[[int], Mapping[str, Any]] | None = None
    emulation: str | None = None  # a subclass that needs no accelerator, for tests

    @property
    def scales_on_cpus(self) -> bool:
        """True if there can be several ranks or replicas on a machine without accelerators."""
        return self.cluster is not None or self.on_cpus is not None


BACKENDS: dict[str, Entry] = {
    "horovod": Entry(".horovod.backend:Horovod", "..launcher.cluster:HorovodCluster"),
    "multi_worker": Entry(".multi_worker.backend:MultiWorker", "..launcher.cluster:MultiWorkerCluster"),
    "mirrored": Entry(".local.replicas:Mirrored", on_cpus=lambda n: {"devices": [f"CPU:{i}" for i in range(n)]}),
    "central_storage": Entry(
        ".local.replicas:CentralStorage", on_cpus=lambda n: {"compute_devices": [f"CPU:{i}" for i in range(1, n + 1)]}
    ),
    "parameter_server": Entry(".parameter_server.backend:ParameterServer", "..launcher.cluster:ParameterServerCluster"),
    "tpu": Entry(".tpu.backend:TPU", on_cpus=lambda n: {"cores": n}, emulation=".tpu.backend:EmulatedTPU"),
    "serial": Entry(".local.serial:Serial"),
}


def load(place: str) -> Any:
    """Returns the class at `"module:Class"`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module, __name__), name)


def find(name: str) -> Entry:
    """Returns the entry of a registered backend. `ConfigurationError` lists the known ones if none has this name."""
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in ("auto", *BACKENDS))
        raise ConfigurationError("Unknown backend.", f"backend={name!r}", f"Use one of {known}.")
    return BACKENDS[name]


def backend_class(name: str) -> type[Backend]:
    cls: type[Backend] = load(find(name).backend)
    return cls


def choose(launch: Launch | None) -> tuple[type[Backend], Priority]:
    """Returns the backend that `"auto"` is: the user's, or the one that fits the launch best; and why."""
    if (forced := environment.get(environment.BACKEND)) is not None:
        return backend_class(forced), Priority(1, f"chosen by {environment.BACKEND}")
    if launch is None:
        environment.refuse_lone_node()
    candidates = [(cls, cls.priority(launch)) for cls in map(backend_class, BACKENDS)]
    return max(candidates, key=lambda candidate: candidate[1].score)  # of equal ones the first


__all__ = ["BACKENDS", "Priority", "Backend", "Entry", "backend_class", "choose", "find", "load"]
