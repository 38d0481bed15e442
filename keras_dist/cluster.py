"""The place of this process among the ranks, and the collectives that a script can call."""

from __future__ import annotations

from typing import Any

from keras_dist.comm.backend import Backend
from keras_dist.errors import DistributionError

_backend: Backend | None = None


def is_started() -> bool:
    """True after `kd.init()`."""
    return _backend is not None


def set_backend(backend: Backend) -> None:
    global _backend
    _backend = backend


def current_backend() -> Backend:
    """Returns the backend that `kd.init()` has started, and raises before."""
    if _backend is None:
        raise DistributionError(
            "keras_dist is not initialized.",
            "a call before kd.init()",
            "Call kd.init() first, at the top of the script.",
        )
    return _backend


def used_backend() -> Backend:
    """Returns the backend to a script that now shares its work: no warning at the end says that it did not."""
    backend = current_backend()
    backend.is_used = True
    return backend


def rank() -> int:
    """Returns the index of this process, `0 <= rank < size`."""
    return used_backend().topology.rank


def size() -> int:
    """Returns the number of processes that train together."""
    return current_backend().topology.size


def num_replicas() -> int:
    """Returns the number of shares of a global batch: `size()`, or the number of devices if there is one process."""
    return current_backend().num_replicas


def local_rank() -> int:
    """Returns the index of this process among the processes on the same host."""
    return used_backend().topology.local_rank


def is_chief() -> bool:
    """Returns True on the one process that writes files. Guard your script's own files by `if kd.is_chief(): ...`."""
    return current_backend().topology.is_chief


def barrier() -> None:
    """Waits until all ranks have made this call. Every rank must call it.

    Raises:
        MismatchError: If another rank is in a different call.
        PeerLostError: If another rank is gone.
    """
    current_backend().all_gather_object("kd.barrier()")


def broadcast(value: Any) -> Any:
    """Returns the chief's value on every rank. Every rank must call it.

    Args:
        value: Number, text, bytes, array or tensor, or lists, tuples, sets and dicts of them. Only the chief's value
            is used.

    Raises:
        ConfigurationError: If the value is, or contains, something else. No pickle is sent: it could run code.
        MismatchError: If another rank is in a different call.
        PeerLostError: If another rank is gone.

    Example:

    ```python
    run_name = kd.broadcast(time.strftime("%H%M%S"))  # one name for all
    ```
    """
    backend = current_backend()
    return backend.all_gather_object("kd.broadcast()", value if backend.topology.is_chief else None)[0]
