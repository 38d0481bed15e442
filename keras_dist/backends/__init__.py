"""All backends, in order of preference: the one place to add a backend.

Names map to where the class lives, so that a backend is imported only when it is chosen.
"""

from __future__ import annotations

import importlib

from keras_dist.comm.backend import Affinity, Backend
from keras_dist.environment import Launch
from keras_dist.errors import ConfigurationError

BACKENDS: dict[str, str] = {
    "horovod": "keras_dist.backends.horovod.backend:Horovod",
    "multi_worker": "keras_dist.backends.multi_worker.backend:MultiWorker",
    "mirrored": "keras_dist.backends.local.mirrored:Mirrored",
    "central_storage": "keras_dist.backends.local.central_storage:CentralStorage",
    "parameter_server": "keras_dist.backends.parameter_server.backend:ParameterServer",
    "tpu": "keras_dist.backends.tpu.backend:TPU",
    "serial": "keras_dist.backends.local.serial:Serial",
}


def backend_class(name: str) -> type[Backend]:
    """Returns the class of a registered backend.

    Raises:
        ConfigurationError: If no backend has this name; the known ones are listed.
    """
    if name not in BACKENDS:
        known = ", ".join(repr(known) for known in ("auto", *BACKENDS))
        raise ConfigurationError("Unknown backend.", f"backend={name!r}", f"Use one of {known}.")
    module, _, attribute = BACKENDS[name].partition(":")
    cls: type[Backend] = getattr(importlib.import_module(module), attribute)
    return cls


def choose(launch: Launch | None) -> tuple[type[Backend], Affinity]:
    """Returns the backend that fits the launch best, and why. Earlier ones win a tie."""
    candidates = [(backend_class(name), backend_class(name).affinity(launch)) for name in BACKENDS]
    return max(candidates, key=lambda candidate: candidate[1].score)


__all__ = ["BACKENDS", "Affinity", "Backend", "backend_class", "choose"]
