"""On which clusters a promised case is tried."""

from __future__ import annotations

from collections.abc import Sequence

from keras_dist.backends import BACKENDS

# Every registered backend is here: one rank where it has no launcher on this machine.
DEFAULT_SIZES: dict[str, tuple[int, ...]] = {"serial": (1,), "horovod": (2,)}


def clusters(more_sizes: Sequence[int] = ()) -> list[tuple[str, int]]:
    """Returns (backend, number of ranks), for backends with several ranks also of the further sizes."""
    chosen = []
    for backend in BACKENDS:
        sizes = DEFAULT_SIZES[backend]
        chosen += [(backend, size) for size in (*sizes, *(more_sizes if max(sizes) > 1 else ()))]
    return sorted(chosen, key=lambda cluster: (cluster[0] != "serial", cluster))
